// Sums and accumulation whose results do not depend on the instruction set, on threads or on how a range is cut.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace ballast::kernels {

// destination[i] += scale * source[i], the product rounded before the sum. The bf16 form adds in fp32 and rounds the
// sum to nearest even.
void accumulate_fp32(float* destination, const float* source, float scale, std::size_t count);
void accumulate_bf16(std::uint16_t* destination, const std::uint16_t* source, float scale, std::size_t count);

// Elements per block of the sums of squares. Callers cut ranges only at multiples of it, from a fixed origin.
constexpr std::size_t kSumBlock = 4096;
// block_sums[b] = sum of squares of elements [b * kSumBlock, (b + 1) * kSumBlock), for ceil(count / kSumBlock) blocks,
// in double and in a fixed order of lanes. A block holding NaN or infinity sums to NaN or infinity. Squares of fp32
// values cannot overflow a double, so a sum is finite exactly where all elements are.
void sum_of_squares_fp32(const float* source, std::size_t count, double* block_sums);
void sum_of_squares_bf16(const std::uint16_t* source, std::size_t count, double* block_sums);

bool all_finite_fp32(const float* source, std::size_t count);
bool all_finite_bf16(const std::uint16_t* source, std::size_t count);

}  // namespace ballast::kernels
