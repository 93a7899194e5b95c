// Number formats: fp32 to and from bf16, fp16 and the split form. Casts round to nearest even and keep NaN (quieted,
// payload's upper bits kept). The split form rounds to nearest with ties away from zero, so that it can be inverted:
// bf16 = (bits + 0x8000) >> 16 and remainder = low 16 bits as a signed number, so bits = (bf16 << 16) + remainder.
// A finite value that rounds up to infinity publishes infinity and is still rebuilt exactly; infinities likewise. NaN
// publishes bits >> 16 with the quiet bit set and keeps its low half, and the halves of a NaN are joined without a
// borrow, so NaN stays NaN (signalling ones become quiet); every other one of the 2^32 patterns is rebuilt bit for bit.
// Widening is exact; of the NaNs, fp16 ones become quiet and bf16 ones keep their bits.
//
// Plain functions: no threads, allocation or I/O; pointers aligned to their element; arrays do not overlap; results do
// not depend on the instruction set. A count of 0 touches nothing.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace ballast::kernels {

void fp32_to_bf16(const float* source, std::uint16_t* destination, std::size_t count);
void bf16_to_fp32(const std::uint16_t* source, float* destination, std::size_t count);
void fp32_to_fp16(const float* source, std::uint16_t* destination, std::size_t count);
void fp16_to_fp32(const std::uint16_t* source, float* destination, std::size_t count);
void split_fp32(const float* source, std::uint16_t* parameter, std::uint16_t* remainder, std::size_t count);
void merge_fp32(const std::uint16_t* parameter, const std::uint16_t* remainder, float* destination, std::size_t count);

}  // namespace ballast::kernels
