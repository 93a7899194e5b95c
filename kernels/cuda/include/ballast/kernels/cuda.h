// The numeric loops for states that live in the memory of a CUDA device: the formulas of adam.h, reduce.h and
// convert.h, in the same order and rounding, so that the results are the same bits as on the CPU (of a NaN only that it
// is one).
//
// Plain launches: each enqueues on `stream` (a cudaStream_t of the current device, never null) and returns the
// cudaError_t of the launch (0: enqueued). Pointers are device addresses, aligned to their element (to 16 bytes for
// full speed); arrays do not overlap. Counts of 0 enqueue nothing. Any thread; no allocation, no waiting.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/kernels/adam.h>

#include <cstddef>
#include <cstdint>

namespace ballast::kernels::cuda {

// A run of elements with scalars of their own.
struct AdamSegment {
  std::uint64_t begin;
  std::uint64_t count;
  AdamScalars scalars;
};
// One pass over the segments, which are in ascending order and do not overlap; element i is at index i of each array.
// Elements outside all segments are left alone. `segments` is read during the call.
int adam(const AdamArrays& arrays, const AdamSegment* segments, std::size_t segment_count, void* stream);

// destination[i] += scale * source[i].
int accumulate(ElementType type, void* destination, const void* source, float scale, std::uint64_t count, void* stream);
// As kernels::sum_of_squares_*: ceil(count / kSumBlock) sums, in device memory.
int sum_of_squares(ElementType type, const void* source, std::uint64_t count, double* block_sums, void* stream);
// *not_finite = 1 where an element is infinite or NaN; otherwise it keeps what it held.
int find_non_finite(ElementType type, const void* source, std::uint64_t count, std::uint32_t* not_finite, void* stream);
// destination[i] = value, rounded to the type.
int fill(ElementType type, void* destination, float value, std::uint64_t count, void* stream);

int fp32_to_bf16(const float* source, std::uint16_t* destination, std::uint64_t count, void* stream);
int bf16_to_fp32(const std::uint16_t* source, float* destination, std::uint64_t count, void* stream);
int fp32_to_fp16(const float* source, std::uint16_t* destination, std::uint64_t count, void* stream);
int fp16_to_fp32(const std::uint16_t* source, float* destination, std::uint64_t count, void* stream);
int split_fp32(const float* source, std::uint16_t* parameter, std::uint16_t* remainder, std::uint64_t count,
               void* stream);
int merge_fp32(const std::uint16_t* parameter, const std::uint16_t* remainder, float* destination, std::uint64_t count,
               void* stream);

}  // namespace ballast::kernels::cuda
