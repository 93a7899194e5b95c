// WakeEvent over an eventfd.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/base/wake_event.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace ballast::base {

WakeEvent::WakeEvent() : descriptor_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (descriptor_ < 0) throw IoError(std::string("eventfd: ") + std::strerror(errno));
}

WakeEvent::~WakeEvent() { ::close(descriptor_); }

void WakeEvent::notify() noexcept {
  const std::uint64_t one = 1;
  // EAGAIN means that the counter is full, that is, already notified; EINTR cannot happen on a descriptor that never
  // blocks.
  [[maybe_unused]] const ssize_t written = ::write(descriptor_, &one, sizeof one);
}

bool WakeEvent::wait(int timeout_ms) {
  pollfd entry{descriptor_, POLLIN, 0};
  int ready;
  do {
    ready = ::poll(&entry, 1, timeout_ms);
  } while (ready < 0 && errno == EINTR && timeout_ms < 0);
  if (ready <= 0) return false;
  std::uint64_t count;
  return ::read(descriptor_, &count, sizeof count) == sizeof count;
}

}  // namespace ballast::base
