// What every kind of communicator is told when it is made.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

namespace ballast {

struct CommunicatorOptions {
  // How long a rank waits, at one place in the order, for another that makes no progress before that one counts as
  // dead, stopped or stuck. Configuration: communication.timeout_seconds.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

}  // namespace ballast
