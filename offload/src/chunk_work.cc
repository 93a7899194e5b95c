// A chunk's numeric work, cut into fixed pieces over a pool. All arithmetic is in kernels/.
// SPDX-License-Identifier: Apache-2.0
#include "ballast/offload/chunk_work.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>
#if defined(__x86_64__) && __has_include(<xxh_x86dispatch.h>)
#include <xxh_x86dispatch.h>  // same hashes, with the widest vectors of this CPU
#endif

#include "ballast/base/check.h"
#include "ballast/kernels/moments.h"
#include "ballast/kernels/reduce.h"

namespace ballast::offload {
namespace {

// Elements per piece: some 1.7 MB of states, so that handing a piece out costs nothing beside working on it.
constexpr std::size_t kPieceElements = 64 * 1024;
static_assert(kPieceElements % kernels::kSumBlock == 0 && kPieceElements % kernels::kMomentBlock == 0);

constexpr std::size_t kHashBytes = 256 * 1024;
constexpr std::size_t kHashesPerGroup = 256;

std::size_t element_bytes(kernels::ElementType type) { return type == kernels::ElementType::fp32 ? 4 : 2; }
// Bytes before an element; with 8-bit moments the first of a block.
std::size_t moment_bytes(kernels::ElementType type, std::size_t elements) {
  return type == kernels::ElementType::int8 ? elements / kernels::kMomentBlock * kernels::kMomentBlockBytes
                                            : elements * element_bytes(type);
}
std::size_t parameter_bytes(kernels::ParameterFormat format) {
  return format == kernels::ParameterFormat::fp32 ? 4 : 2;
}
std::size_t master_bytes(kernels::ParameterFormat format) {
  switch (format) {
    case kernels::ParameterFormat::split_bf16:
      return 2;
    case kernels::ParameterFormat::fp16:
      return 4;
    case kernels::ParameterFormat::fp32:
      break;
  }
  return 0;
}

std::byte* at(std::byte* base, std::size_t bytes) { return base == nullptr ? nullptr : base + bytes; }

void update_range(const ChunkArrays& arrays, const kernels::AdamScalars& scalars, std::size_t begin, std::size_t end) {
  const std::size_t parameter = parameter_bytes(arrays.parameter_format);
  kernels::AdamArrays range;
  range.parameter_format = arrays.parameter_format;
  range.moment_type = arrays.moment_type;
  range.gradient_type = arrays.gradient_type;
  range.parameter = at(arrays.parameter, begin * parameter);
  range.master = at(arrays.master, begin * master_bytes(arrays.parameter_format));
  range.exp_avg = at(arrays.exp_avg, moment_bytes(arrays.moment_type, begin));
  range.exp_avg_sq = at(arrays.exp_avg_sq, moment_bytes(arrays.moment_type, begin));
  range.gradient = arrays.gradient + begin * element_bytes(arrays.gradient_type);
  range.published = at(arrays.published, begin * parameter);
  kernels::adam(scalars, range, end - begin);
}

}  // namespace

void update_chunk(CpuPool& pool, const ChunkArrays& arrays, std::span<const UpdateSegment> segments) {
  std::uint64_t end = 0;
  for (const UpdateSegment& segment : segments) {
    BALLAST_CHECK(segment.begin >= end && segment.count <= UINT64_MAX - segment.begin);
    BALLAST_CHECK(arrays.moment_type != kernels::ElementType::int8 || segment.begin % kernels::kMomentBlock == 0);
    end = segment.begin + segment.count;
  }
  if (end == 0) return;
  BALLAST_CHECK(arrays.parameter != nullptr && arrays.exp_avg != nullptr && arrays.exp_avg_sq != nullptr &&
                arrays.gradient != nullptr);
  BALLAST_CHECK(arrays.master != nullptr || master_bytes(arrays.parameter_format) == 0);
  const std::uint64_t start = segments.front().begin;
  // Pieces of the chunk, not of its segments: hundreds of tiny parameters are one piece.
  parallel_for(pool, end - start, kPieceElements, [&](std::size_t piece_begin, std::size_t piece_end) {
    const std::uint64_t from = start + piece_begin;
    const std::uint64_t to = start + piece_end;
    auto segment = std::partition_point(segments.begin(), segments.end(), [&](const UpdateSegment& candidate) {
      return candidate.begin + candidate.count <= from;
    });
    for (; segment != segments.end() && segment->begin < to; ++segment) {
      const std::uint64_t range_begin = std::max(segment->begin, from);
      const std::uint64_t range_end = std::min(segment->begin + segment->count, to);
      if (range_begin < range_end) update_range(arrays, segment->scalars, range_begin, range_end);
    }
  });
}

void accumulate_chunk(CpuPool& pool, kernels::ElementType type, std::byte* destination, const std::byte* source,
                      std::uint64_t count, bool first) {
  const std::size_t bytes = element_bytes(type);
  parallel_for(pool, count, kPieceElements, [&](std::size_t begin, std::size_t end) {
    std::byte* const to = destination + begin * bytes;
    const std::byte* const from = source + begin * bytes;
    if (first) {
      std::memcpy(to, from, (end - begin) * bytes);
    } else if (type == kernels::ElementType::fp32) {
      kernels::accumulate_fp32(reinterpret_cast<float*>(to), reinterpret_cast<const float*>(from), 1.0f, end - begin);
    } else {
      kernels::accumulate_bf16(reinterpret_cast<std::uint16_t*>(to), reinterpret_cast<const std::uint16_t*>(from), 1.0f,
                               end - begin);
    }
  });
}

void sum_squares_chunk(CpuPool& pool, kernels::ElementType type, const std::byte* source, std::uint64_t count,
                       double* block_sums) {
  const std::size_t bytes = element_bytes(type);
  parallel_for(pool, count, kPieceElements, [&](std::size_t begin, std::size_t end) {
    const std::byte* const from = source + begin * bytes;
    double* const sums = block_sums + begin / kernels::kSumBlock;
    if (type == kernels::ElementType::fp32) {
      kernels::sum_of_squares_fp32(reinterpret_cast<const float*>(from), end - begin, sums);
    } else {
      kernels::sum_of_squares_bf16(reinterpret_cast<const std::uint16_t*>(from), end - begin, sums);
    }
  });
}

std::uint64_t checksum(CpuPool& pool, const std::byte* data, std::uint64_t bytes) {
  // A group's hashes lie on the stack; the hash of the groups before seeds the next.
  std::array<std::uint64_t, kHashesPerGroup> hashes;
  std::uint64_t chained = bytes;
  for (std::uint64_t begin = 0; begin < bytes;) {
    const std::uint64_t group_bytes = std::min<std::uint64_t>(bytes - begin, kHashBytes * kHashesPerGroup);
    const std::byte* const group = data + begin;
    parallel_for(pool, group_bytes, kHashBytes, [&](std::size_t from, std::size_t to) {
      hashes[from / kHashBytes] = XXH3_64bits(group + from, to - from);
    });
    const std::size_t hash_count = (group_bytes + kHashBytes - 1) / kHashBytes;
    chained = XXH3_64bits_withSeed(hashes.data(), hash_count * sizeof(std::uint64_t), chained);
    begin += group_bytes;
  }
  return chained;
}

}  // namespace ballast::offload
