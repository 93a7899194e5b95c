// Moments in 8 bits: blocks of 256 elements, each element an entry of a fixed map times the block's scale. The maps are
// the dynamic ones of "8-bit Optimizers via Block-wise Quantization" (Dettmers et al., 2022), as bitsandbytes makes
// them:
//   exp_avg     0, and for each decade i of 7, 10^(i-7+1) x the means of 2^i equal parts of [0.1, 1], both signs; and 1
//   exp_avg_sq  0, and the same with 2^(i+1) parts, no negative ones; and 1
// which reach down to 5.5e-7 and 3.25e-7 of the scale.
//
// A block is 260 bytes: the scale (fp32, native byte order, not aligned to more than 4), then 256 bytes: entries of
// exp_avg as two's complement numbers counted from 0 outward (128, which would be -128, is 1), entries of exp_avg_sq
// counted upward from 0. So all bytes 0 is 256 zeros. Where blocks begin is the caller's: always at the same elements,
// or results would depend on it. Elements of the last block beyond its range's end are stored as 0.
//
// To store a block: the scale is the element of largest magnitude, with its sign (of two alike the positive one): 1 has
// no negative counterpart, and so that element is exact, and storing what was read gives the same values again. Each
// element / scale, rounded to fp32, gets the nearest entry, of two equally near ones the one nearer to 0. But an
// element of exp_avg_sq that is not 0 never gets entry 0: beside an exp_avg that is stored more finely, sqrt(0) +
// epsilon would make a step of any size of it; it gets the smallest entry, and so steps too small. (The paper's updates
// leave it at 0.) A block that holds NaN or infinity gets the scale NaN, and all of it reads as NaN.
//
// Plain functions: no threads, allocation or I/O; blocks do not overlap values; results do not depend on the
// instruction set. A count of 0 touches nothing.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace ballast::kernels {

constexpr std::size_t kMomentBlock = 256;  // elements
constexpr std::size_t kMomentBlockBytes = sizeof(float) + kMomentBlock;

enum class Moment : std::uint8_t { exp_avg, exp_avg_sq };

// Stores `count` elements in ceil(count / kMomentBlock) whole blocks; those of exp_avg_sq are not negative.
void fp32_to_int8_blocks(Moment moment, const float* source, std::byte* blocks, std::size_t count);
// Elements `first` to `first` + `count` of those that `blocks` begins with.
void int8_blocks_to_fp32(Moment moment, const std::byte* blocks, std::size_t first, float* destination,
                         std::size_t count);

}  // namespace ballast::kernels
