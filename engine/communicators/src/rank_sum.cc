// Sums in rank order, a block at a time, so that the sum stays in the first-level cache.
// SPDX-License-Identifier: Apache-2.0
#include "rank_sum.h"

#include <ballast/base/check.h>
#include <ballast/kernels/convert.h>
#include <ballast/kernels/reduce.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace ballast::communicators {
namespace {

constexpr std::size_t kBlockElements = 2048;

void widen(DataType type, const std::byte* source, float* out, std::size_t count) {
  switch (type) {
    case DataType::fp32:
      std::memcpy(out, source, count * sizeof(float));
      return;
    case DataType::bf16:
      kernels::bf16_to_fp32(reinterpret_cast<const std::uint16_t*>(source), out, count);
      return;
    case DataType::fp16:
      kernels::fp16_to_fp32(reinterpret_cast<const std::uint16_t*>(source), out, count);
      return;
  }
  BALLAST_CHECK(false);
}

void narrow(DataType type, const float* source, std::byte* out, std::size_t count) {
  switch (type) {
    case DataType::fp32:
      std::memcpy(out, source, count * sizeof(float));
      return;
    case DataType::bf16:
      kernels::fp32_to_bf16(source, reinterpret_cast<std::uint16_t*>(out), count);
      return;
    case DataType::fp16:
      kernels::fp32_to_fp16(source, reinterpret_cast<std::uint16_t*>(out), count);
      return;
  }
  BALLAST_CHECK(false);
}

}  // namespace

void sum_in_order(DataType type, std::span<const std::byte* const> sources, std::byte* destination,
                  std::size_t elements) {
  BALLAST_CHECK(!sources.empty());
  alignas(64) std::array<float, kBlockElements> sum;
  alignas(64) std::array<float, kBlockElements> wide;
  for (std::size_t first = 0; first < elements; first += kBlockElements) {
    const std::size_t count = std::min(kBlockElements, elements - first);
    const std::size_t offset = first * element_bytes(type);
    widen(type, sources.front() + offset, sum.data(), count);
    for (const std::byte* source : sources.subspan(1)) {
      if (type == DataType::fp32) {
        kernels::accumulate_fp32(sum.data(), reinterpret_cast<const float*>(source + offset), 1.0F, count);
      } else {
        widen(type, source + offset, wide.data(), count);
        kernels::accumulate_fp32(sum.data(), wide.data(), 1.0F, count);
      }
    }
    narrow(type, sum.data(), destination + offset, count);
  }
}

void sum_values_in_order(std::span<const std::byte* const> sources, double* destination, std::size_t count) {
  BALLAST_CHECK(!sources.empty());
  if (count == 0) return;
  std::memcpy(destination, sources.front(), count * sizeof(double));
  for (const std::byte* source : sources.subspan(1)) {
    const auto* const values = reinterpret_cast<const double*>(source);
    for (std::size_t i = 0; i < count; ++i) destination[i] += values[i];
  }
}

}  // namespace ballast::communicators
