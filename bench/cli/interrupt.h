// Ctrl-C and SIGTERM as a question between steps. The second one ends the process at once.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>

namespace ballast::cli {

// One at a time in a process. Signals that were ignored stay ignored.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

  static int signal_seen();  // 0: none

 private:
  struct sigaction interrupt_ {};
  struct sigaction terminate_ {};
};

}  // namespace ballast::cli
