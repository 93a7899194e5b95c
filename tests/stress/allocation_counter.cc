// The counting operator new. In a file of its own, so that no compiler sees through it.
// SPDX-License-Identifier: Apache-2.0
#include "allocation_counter.h"

#include <cstdlib>
#include <new>

namespace ballast::testing {
std::atomic<bool> count_allocations{false};
std::atomic<std::uint64_t> allocations{0};
std::atomic<std::uint64_t> largest_allocation{0};
}  // namespace ballast::testing

#ifndef BALLAST_SANITIZED
void* operator new(std::size_t bytes) {
  using namespace ballast::testing;
  if (count_allocations.load(std::memory_order_relaxed)) allocations.fetch_add(1, std::memory_order_relaxed);
  if (bytes > largest_allocation.load(std::memory_order_relaxed)) {
    largest_allocation.store(bytes, std::memory_order_relaxed);
  }
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
#endif
