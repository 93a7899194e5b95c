// Number formats, compiled for every instruction set.
// SPDX-License-Identifier: Apache-2.0
#include "ballast/kernels/convert.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/convert.cc"
#include <hwy/foreach_target.h>  // before highway.h
#include <hwy/highway.h>

#include "cpu/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {
namespace {

// Each converts kStep elements.
struct ToBf16 {
  HWY_INLINE void operator()(const float* source, std::uint16_t* destination) const {
    store(as_stored(load(source), destination), as_stored(load(source + kLanes), destination), destination);
  }
};
struct FromBf16 {
  HWY_INLINE void operator()(const std::uint16_t* source, float* destination) const {
    store(load(source), load(source + kLanes), destination);
  }
};
struct ToFp16 {
  HWY_INLINE void operator()(const float* source, std::uint16_t* destination) const {
    store_fp16(load(source), load(source + kLanes), destination);
  }
};
struct FromFp16 {
  HWY_INLINE void operator()(const std::uint16_t* source, float* destination) const {
    store(load_fp16(source), load_fp16(source + kLanes), destination);
  }
};
HWY_INLINE void split(const float* source, std::uint16_t* parameter, std::uint16_t* remainder) {
  split_store(load(source), load(source + kLanes), parameter, remainder, nullptr);
}
HWY_INLINE void merge(const std::uint16_t* parameter, const std::uint16_t* remainder, float* destination) {
  store(merge_load(parameter, remainder), merge_load(parameter + kLanes, remainder + kLanes), destination);
}

// Whole steps in place, the tail through copies with the same code.
template <class Body, class From, class To>
HWY_INLINE void convert_range(Body body, const From* source, To* destination, std::size_t count) {
  std::size_t i = 0;
  for (; count - i >= kStep; i += kStep) body(source + i, destination + i);
  if (i == count) return;
  From from[kStep] = {};
  To to[kStep];
  std::memcpy(from, source + i, (count - i) * sizeof(From));
  body(from, to);
  std::memcpy(destination + i, to, (count - i) * sizeof(To));
}

void fp32_to_bf16_cpu(const float* source, std::uint16_t* destination, std::size_t count) {
  convert_range(ToBf16(), source, destination, count);
}
void bf16_to_fp32_cpu(const std::uint16_t* source, float* destination, std::size_t count) {
  convert_range(FromBf16(), source, destination, count);
}
void fp32_to_fp16_cpu(const float* source, std::uint16_t* destination, std::size_t count) {
  convert_range(ToFp16(), source, destination, count);
}
void fp16_to_fp32_cpu(const std::uint16_t* source, float* destination, std::size_t count) {
  convert_range(FromFp16(), source, destination, count);
}

void split_fp32_cpu(const float* source, std::uint16_t* parameter, std::uint16_t* remainder, std::size_t count) {
  std::size_t i = 0;
  for (; count - i >= kStep; i += kStep) split(source + i, parameter + i, remainder + i);
  if (i == count) return;
  const std::size_t rest = count - i;
  float from[kStep] = {};
  std::uint16_t upper[kStep];
  std::uint16_t lower[kStep];
  std::memcpy(from, source + i, rest * sizeof(float));
  split(from, upper, lower);
  std::memcpy(parameter + i, upper, rest * sizeof(std::uint16_t));
  std::memcpy(remainder + i, lower, rest * sizeof(std::uint16_t));
}

void merge_fp32_cpu(const std::uint16_t* parameter, const std::uint16_t* remainder, float* destination,
                    std::size_t count) {
  std::size_t i = 0;
  for (; count - i >= kStep; i += kStep) merge(parameter + i, remainder + i, destination + i);
  if (i == count) return;
  const std::size_t rest = count - i;
  std::uint16_t upper[kStep] = {};
  std::uint16_t lower[kStep] = {};
  float to[kStep];
  std::memcpy(upper, parameter + i, rest * sizeof(std::uint16_t));
  std::memcpy(lower, remainder + i, rest * sizeof(std::uint16_t));
  merge(upper, lower, to);
  std::memcpy(destination + i, to, rest * sizeof(float));
}

}  // namespace
}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {

HWY_EXPORT(fp32_to_bf16_cpu);
HWY_EXPORT(bf16_to_fp32_cpu);
HWY_EXPORT(fp32_to_fp16_cpu);
HWY_EXPORT(fp16_to_fp32_cpu);
HWY_EXPORT(split_fp32_cpu);
HWY_EXPORT(merge_fp32_cpu);

void fp32_to_bf16(const float* source, std::uint16_t* destination, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(fp32_to_bf16_cpu)(source, destination, count);
}
void bf16_to_fp32(const std::uint16_t* source, float* destination, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(bf16_to_fp32_cpu)(source, destination, count);
}
void fp32_to_fp16(const float* source, std::uint16_t* destination, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(fp32_to_fp16_cpu)(source, destination, count);
}
void fp16_to_fp32(const std::uint16_t* source, float* destination, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(fp16_to_fp32_cpu)(source, destination, count);
}
void split_fp32(const float* source, std::uint16_t* parameter, std::uint16_t* remainder, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(split_fp32_cpu)(source, parameter, remainder, count);
}
void merge_fp32(const std::uint16_t* parameter, const std::uint16_t* remainder, float* destination, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(merge_fp32_cpu)(parameter, remainder, destination, count);
}

}  // namespace ballast::kernels
#endif  // HWY_ONCE
