// Tells ThreadSanitizer about an order that it cannot see, because the library that makes it is not instrumented.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#if defined(__SANITIZE_THREAD__)
#define BALLAST_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define BALLAST_TSAN 1
#endif
#endif

#ifdef BALLAST_TSAN
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
#endif

namespace ballast::offload {

inline void tsan_acquire([[maybe_unused]] void* address) {
#ifdef BALLAST_TSAN
  __tsan_acquire(address);
#endif
}

inline void tsan_release([[maybe_unused]] void* address) {
#ifdef BALLAST_TSAN
  __tsan_release(address);
#endif
}

}  // namespace ballast::offload
