// The CPU's work on one chunk: gradient accumulation with its sum of squares, the optimizer update over parameter
// segments, checksums. Pure functions of their arguments, spread over a CpuPool; results do not depend on its width.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/kernels/adam.h>
#include <ballast/offload/cpu_pool.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace ballast::offload {

// A run of elements of one parameter within a chunk. Elements outside all segments are padding and are left alone.
struct UpdateSegment {
  std::uint64_t begin = 0;  // element within the chunk
  std::uint64_t count = 0;
  kernels::AdamScalars scalars{};  // of its group and step number
};

// Where a chunk's arrays are. Element i of the chunk is at index i of each; 8-bit moments lie in blocks that begin with
// element 0, and so does every segment with one.
struct ChunkArrays {
  kernels::ParameterFormat parameter_format = kernels::ParameterFormat::split_bf16;
  kernels::ElementType moment_type = kernels::ElementType::fp32;
  kernels::ElementType gradient_type = kernels::ElementType::fp32;
  std::byte* parameter = nullptr;
  std::byte* master = nullptr;
  std::byte* exp_avg = nullptr;
  std::byte* exp_avg_sq = nullptr;
  const std::byte* gradient = nullptr;
  std::byte* published = nullptr;  // optional
};
void update_chunk(CpuPool& pool, const ChunkArrays& arrays, std::span<const UpdateSegment> segments);

// destination = source (first) or destination += source, element-wise in `type`.
void accumulate_chunk(CpuPool& pool, kernels::ElementType type, std::byte* destination, const std::byte* source,
                      std::uint64_t count, bool first);
// block_sums as kernels::sum_of_squares_*, count from a block border; ceil(count / kSumBlock) values.
void sum_squares_chunk(CpuPool& pool, kernels::ElementType type, const std::byte* source, std::uint64_t count,
                       double* block_sums);

// XXH3 of a range, cut into fixed pieces whose hashes are hashed again: the same whatever the pool's width.
std::uint64_t checksum(CpuPool& pool, const std::byte* data, std::uint64_t bytes);

}  // namespace ballast::offload
