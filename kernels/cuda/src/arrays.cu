// The other loops on the device.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/kernels/cuda.h>
#include <launch.h>

#include "array_bodies.h"

namespace ballast::kernels::cuda {
namespace {

bool aligned16(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }
std::uint64_t items_of(std::uint64_t count) { return (count + kVector - 1) / kVector; }

template <class Operation>
int run(const Operation& operation, std::uint64_t count, bool aligned, void* stream) {
  const ArrayBody<Operation> body{operation, count, aligned};
  return static_cast<int>(launch_items(body, items_of(count), static_cast<cudaStream_t>(stream)));
}

template <class To, class From, class Function>
int combine(To* destination, const From* source, Function function, std::uint64_t count, void* stream) {
  return run(Combine<To, From, Function>{destination, source, function}, count,
             aligned16(destination) && aligned16(source), stream);
}

template <class T>
int sum(const void* source, std::uint64_t count, double* block_sums, void* stream) {
  const SumSquares<T> body{static_cast<const T*>(source), count, block_sums};
  return static_cast<int>(launch_warps(body, (count + kSumBlock - 1) / kSumBlock, static_cast<cudaStream_t>(stream)));
}

}  // namespace

int accumulate(ElementType type, void* destination, const void* source, float scale, std::uint64_t count,
               void* stream) {
  if (type == ElementType::fp32) {
    return combine(static_cast<float*>(destination), static_cast<const float*>(source), AddScaled{scale}, count,
                   stream);
  }
  return combine(static_cast<std::uint16_t*>(destination), static_cast<const std::uint16_t*>(source), AddScaled{scale},
                 count, stream);
}

int sum_of_squares(ElementType type, const void* source, std::uint64_t count, double* block_sums, void* stream) {
  return type == ElementType::fp32 ? sum<float>(source, count, block_sums, stream)
                                   : sum<std::uint16_t>(source, count, block_sums, stream);
}

int find_non_finite(ElementType type, const void* source, std::uint64_t count, std::uint32_t* not_finite,
                    void* stream) {
  if (type == ElementType::fp32) {
    return run(FindNonFinite<float>{static_cast<const float*>(source), not_finite}, count, aligned16(source), stream);
  }
  return run(FindNonFinite<std::uint16_t>{static_cast<const std::uint16_t*>(source), not_finite}, count,
             aligned16(source), stream);
}

int fill(ElementType type, void* destination, float value, std::uint64_t count, void* stream) {
  if (type == ElementType::fp32) {
    return run(Fill<float>{static_cast<float*>(destination), value}, count, aligned16(destination), stream);
  }
  return run(Fill<std::uint16_t>{static_cast<std::uint16_t*>(destination), bf16_rounded(value)}, count,
             aligned16(destination), stream);
}

int fp32_to_bf16(const float* source, std::uint16_t* destination, std::uint64_t count, void* stream) {
  return combine(destination, source, ToBf16{}, count, stream);
}
int bf16_to_fp32(const std::uint16_t* source, float* destination, std::uint64_t count, void* stream) {
  return combine(destination, source, FromBf16{}, count, stream);
}
int fp32_to_fp16(const float* source, std::uint16_t* destination, std::uint64_t count, void* stream) {
  return combine(destination, source, ToFp16{}, count, stream);
}
int fp16_to_fp32(const std::uint16_t* source, float* destination, std::uint64_t count, void* stream) {
  return combine(destination, source, FromFp16{}, count, stream);
}
int split_fp32(const float* source, std::uint16_t* parameter, std::uint16_t* remainder, std::uint64_t count,
               void* stream) {
  return run(Split{source, parameter, remainder}, count,
             aligned16(source) && aligned16(parameter) && aligned16(remainder), stream);
}
int merge_fp32(const std::uint16_t* parameter, const std::uint16_t* remainder, float* destination, std::uint64_t count,
               void* stream) {
  return run(Merge{parameter, remainder, destination}, count,
             aligned16(destination) && aligned16(parameter) && aligned16(remainder), stream);
}

}  // namespace ballast::kernels::cuda
