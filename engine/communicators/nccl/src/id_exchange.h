// A few bytes from rank 0 to all others over TCP, before there is any communicator.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <span>
#include <string>

namespace ballast::communicators {

// Rank 0 listens on `port` and gives `data` to each of the others; these connect to address:port, as soon as it is
// there, and take it. Everyone names the world's size and the launcher's port, so that what belongs to another run is
// turned away. Throws CommunicationError, with the address tried and the ranks that did not come, after the timeout.
void exchange_from_rank_zero(std::span<std::byte> data, int rank, int world_size, const std::string& address, int port,
                             std::chrono::milliseconds timeout);

}  // namespace ballast::communicators
