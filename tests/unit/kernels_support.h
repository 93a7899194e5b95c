// Shared by the kernel tests: arrays between guard pages, one run per instruction set, float bits.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ballast/base/check.h"
#include "ballast/kernels/targets.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define BALLAST_TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define BALLAST_TEST_SANITIZED 1
#endif
#endif

namespace ballast::kernels::testing {

// Sanitizers run the same code ten times slower: they see every path with fewer values.
#ifdef BALLAST_TEST_SANITIZED
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

inline std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }
inline float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }

// Runs `body` once per instruction set that this machine runs, then restores the best.
template <class Body>
void on_each_target(Body body) {
  for (const std::string& target : supported_targets()) {
    SCOPED_TRACE("instruction set " + target);
    ASSERT_TRUE(force_target(target));
    ASSERT_EQ(active_target(), target);
    body();
    if (::testing::Test::HasFatalFailure()) break;
  }
  ASSERT_TRUE(force_target(""));
}

// The lengths that a vector loop can get wrong: up to four of the widest steps (two vectors) and a few more, and some
// large ones.
inline std::vector<std::size_t> lengths() {
  std::vector<std::size_t> all;
  for (std::size_t count = 0; count <= 4 * 32 + 3; ++count) all.push_back(count);
  for (const std::size_t count : {1023u, 1025u, 4097u, 65537u}) all.push_back(count);
  return all;
}

enum class Edge { front, back };

// `count` elements between two inaccessible pages, touching the one at `edge` (the back edge leaves the first element
// aligned to no more than its size). A byte read or written beyond that edge ends the test.
template <class T>
class GuardedArray {
 public:
  GuardedArray(std::size_t count, Edge edge) : count_(count) {
    const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    const std::size_t inner = (count * sizeof(T) + page - 1) / page * page + page;
    mapped_bytes_ = inner + 2 * page;
    mapping_ = ::mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    BALLAST_CHECK(mapping_ != MAP_FAILED);
    char* const first = static_cast<char*>(mapping_) + page;
    BALLAST_CHECK(::mprotect(first, inner, PROT_READ | PROT_WRITE) == 0);
    data_ = reinterpret_cast<T*>(edge == Edge::front ? first : first + inner - count * sizeof(T));
  }
  ~GuardedArray() { BALLAST_CHECK(::munmap(mapping_, mapped_bytes_) == 0); }
  GuardedArray(const GuardedArray&) = delete;
  GuardedArray& operator=(const GuardedArray&) = delete;

  T* data() { return data_; }
  T* begin() { return data_; }
  T* end() { return data_ + count_; }
  T& operator[](std::size_t i) { return data_[i]; }
  std::size_t size() const { return count_; }

 private:
  std::size_t count_;
  std::size_t mapped_bytes_;
  void* mapping_;
  T* data_;
};

}  // namespace ballast::kernels::testing
