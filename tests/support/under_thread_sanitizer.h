// Whether this program runs under the thread sanitizer: for tests that race on purpose.
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

}  // namespace ballast::test
