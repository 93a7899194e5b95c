// Communicator: the seam to the other ranks. One flat buffer per call; every rank makes the same calls in the same
// order. The single communicator is the world of one rank.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

namespace ballast {

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual std::string_view name() const = 0;
  virtual int world_size() const = 0;
  virtual int rank() const = 0;
  // values[i] = sum over ranks, in rank order. Blocks. Throws CommunicationError naming the rank that is missing.
  virtual void all_reduce_sum(std::span<double> values) = 0;
  virtual void barrier() = 0;
};

std::shared_ptr<Communicator> make_single_communicator();

}  // namespace ballast
