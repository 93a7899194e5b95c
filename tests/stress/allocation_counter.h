// Counts what operator new hands out while asked to: for tests of "allocates nothing".
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>

// Under a sanitizer, which has an operator new of its own, nothing is counted.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define BALLAST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define BALLAST_SANITIZED 1
#endif
#endif

namespace ballast::testing {
extern std::atomic<bool> count_allocations;
extern std::atomic<std::uint64_t> allocations;
extern std::atomic<std::uint64_t> largest_allocation;  // bytes of one; counted always
}  // namespace ballast::testing
