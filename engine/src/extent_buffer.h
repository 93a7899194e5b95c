// Memory for one chunk's states, outside the slabs: for initial values, reading back and restoring.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/error.h>
#include <ballast/base/size.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace ballast::engine {

// Direct transfers accept it.
class ExtentBuffer {
 public:
  explicit ExtentBuffer(std::uint64_t bytes)
      : data_(static_cast<std::byte*>(
            std::aligned_alloc(kAlignment, base::round_up(std::max<std::uint64_t>(bytes, 1), kAlignment)))) {
    if (data_ == nullptr) throw PlanError("no memory for a buffer of " + base::format_size(bytes));
  }
  ~ExtentBuffer() { std::free(data_); }
  ExtentBuffer(const ExtentBuffer&) = delete;
  ExtentBuffer& operator=(const ExtentBuffer&) = delete;
  std::byte* data() { return data_; }

 private:
  static constexpr std::uint64_t kAlignment = 64 * base::kKiB;
  std::byte* data_;
};

}  // namespace ballast::engine
