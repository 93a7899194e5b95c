// WakeEvent: what the one thread that waits for everything (rings, streams, workers) sleeps on. An eventfd, so that a
// ring can signal it from the kernel.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ballast::base {

class WakeEvent {
 public:
  // Throws IoError where the descriptor cannot be made.
  WakeEvent();
  ~WakeEvent();
  WakeEvent(const WakeEvent&) = delete;
  WakeEvent& operator=(const WakeEvent&) = delete;

  // Any thread, any number of times; never blocks. A notification before wait() is not lost.
  void notify() noexcept;
  // One thread. Returns true when notified, false after timeout_ms (negative: no end). Consumes all notifications.
  bool wait(int timeout_ms);
  // For registration with a ring; owned by this object, close-on-exec.
  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
};

}  // namespace ballast::base
