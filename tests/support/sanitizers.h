// Which sanitizer this program runs under: for tests that race on purpose, or that take fewer values where the same
// code is ten times slower.
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace ballast::test {

#if defined(__SANITIZE_THREAD__)
constexpr bool kUnderThreadSanitizer = true;
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
constexpr bool kUnderThreadSanitizer = true;
#else
constexpr bool kUnderThreadSanitizer = false;
#endif
#else
constexpr bool kUnderThreadSanitizer = false;
#endif

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = kUnderThreadSanitizer;
#endif
#else
constexpr bool kSanitized = kUnderThreadSanitizer;
#endif

}  // namespace ballast::test
