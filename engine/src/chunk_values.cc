// Conversions of whole chunks.
// SPDX-License-Identifier: Apache-2.0
#include "chunk_values.h"

#include <ballast/kernels/convert.h>

#include <cstring>

namespace ballast::engine {

// A frozen fp16 chunk has no master.
void to_states(const ChunkLayout& chunk, const float* values, std::byte* extent) {
  auto* parameter = reinterpret_cast<std::uint16_t*>(extent);
  std::byte* master = extent + chunk.parameter_bytes;
  switch (chunk.dtype) {
    case DataType::bf16:
      kernels::split_fp32(values, parameter, reinterpret_cast<std::uint16_t*>(master), chunk.elements);
      break;
    case DataType::fp16:
      kernels::fp32_to_fp16(values, parameter, chunk.elements);
      if (chunk.master_bytes > 0) std::memcpy(master, values, chunk.elements * 4);
      break;
    case DataType::fp32:
      std::memcpy(extent, values, chunk.elements * 4);
      break;
  }
}

void to_values(const ChunkLayout& chunk, const std::byte* extent, float* values) {
  const auto* parameter = reinterpret_cast<const std::uint16_t*>(extent);
  const std::byte* master = extent + chunk.parameter_bytes;
  switch (chunk.dtype) {
    case DataType::bf16:
      kernels::merge_fp32(parameter, reinterpret_cast<const std::uint16_t*>(master), values, chunk.elements);
      break;
    case DataType::fp16:
      if (chunk.master_bytes > 0) {
        std::memcpy(values, master, chunk.elements * 4);
      } else {
        kernels::fp16_to_fp32(parameter, values, chunk.elements);
      }
      break;
    case DataType::fp32:
      std::memcpy(values, extent, chunk.elements * 4);
      break;
  }
}

void moment_values(MomentType type, kernels::Moment which, const std::byte* moment, std::uint64_t first,
                   std::span<float> values) {
  switch (type) {
    case MomentType::fp32:
      std::memcpy(values.data(), moment + first * 4, values.size() * 4);
      break;
    case MomentType::bf16:
      kernels::bf16_to_fp32(reinterpret_cast<const std::uint16_t*>(moment) + first, values.data(), values.size());
      break;
    case MomentType::int8:
      kernels::int8_blocks_to_fp32(which, moment, first, values.data(), values.size());
      break;
  }
}

void to_moment(MomentType type, kernels::Moment which, std::span<const float> values, std::byte* moment) {
  switch (type) {
    case MomentType::fp32:
      std::memcpy(moment, values.data(), values.size() * 4);
      break;
    case MomentType::bf16:
      kernels::fp32_to_bf16(values.data(), reinterpret_cast<std::uint16_t*>(moment), values.size());
      break;
    case MomentType::int8:
      kernels::fp32_to_int8_blocks(which, values.data(), moment, values.size());
      break;
  }
}

}  // namespace ballast::engine
