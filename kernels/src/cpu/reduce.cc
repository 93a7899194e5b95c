// Accumulation, sums of squares and the finite check, compiled for every instruction set.
// SPDX-License-Identifier: Apache-2.0
#include "ballast/kernels/reduce.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/reduce.cc"
#include <hwy/foreach_target.h>  // before highway.h
#include <hwy/highway.h>

#include "cpu/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {
namespace {

using F64 = hn::ScalableTag<double>;
using Vd = hn::Vec<F64>;
inline constexpr std::size_t kDoubles = hn::MaxLanes(F64());

template <class T>
HWY_INLINE Vf accumulated(const T* destination, const T* source, Vf scale) {
  return as_stored(hn::Add(load(destination), hn::Mul(scale, load(source))), destination);
}

// kStep elements.
template <class T>
HWY_INLINE void accumulate_step(T* destination, const T* source, Vf scale) {
  const Vf first = accumulated(destination, source, scale);
  store(first, accumulated(destination + kLanes, source + kLanes, scale), destination);
}

template <class T>
void accumulate(T* destination, const T* source, float scale, std::size_t count) {
  const Vf factor = hn::Set(F32(), scale);
  std::size_t i = 0;
  for (; count - i >= kStep; i += kStep) accumulate_step(destination + i, source + i, factor);
  if (i == count) return;
  const std::size_t rest = count - i;
  T from[kStep] = {};
  T to[kStep] = {};
  std::memcpy(from, source + i, rest * sizeof(T));
  std::memcpy(to, destination + i, rest * sizeof(T));
  accumulate_step(to, from, factor);
  std::memcpy(destination + i, to, rest * sizeof(T));
}

void accumulate_fp32_cpu(float* destination, const float* source, float scale, std::size_t count) {
  accumulate(destination, source, scale, count);
}
void accumulate_bf16_cpu(std::uint16_t* destination, const std::uint16_t* source, float scale, std::size_t count) {
  accumulate(destination, source, scale, count);
}

// Element i of a block goes to sum i % kSums, whatever the vector width; the sums are added as a tree. 32 of them keep
// enough additions in flight to read at memory speed.
inline constexpr std::size_t kSums = 32;
inline constexpr std::size_t kAccumulators = kSums / kDoubles;
static_assert(kSumBlock % kSums == 0);

HWY_INLINE Vd load_fp64(const float* source) {
  return hn::PromoteTo(F64(), hn::LoadU(hn::Rebind<float, F64>(), source));
}
HWY_INLINE Vd load_fp64(const std::uint16_t* source) {
  using Half = hn::Rebind<std::uint16_t, F64>;
  using Bits = hn::Rebind<std::uint32_t, F64>;
  const auto bits = hn::ShiftLeft<16>(hn::PromoteTo(Bits(), hn::LoadU(Half(), source)));
  return hn::PromoteTo(F64(), hn::BitCast(hn::Rebind<float, F64>(), bits));
}

template <class T>
HWY_INLINE void add_squares(Vd (&sums)[kAccumulators], const T* source) {
  for (std::size_t a = 0; a < kAccumulators; ++a) {
    const Vd value = load_fp64(source + a * kDoubles);
    sums[a] = hn::Add(sums[a], hn::Mul(value, value));
  }
}

template <class T>
double block_sum(const T* source, std::size_t count) {
  Vd sums[kAccumulators];
  for (Vd& sum : sums) sum = hn::Zero(F64());
  std::size_t i = 0;
  for (; count - i >= kSums; i += kSums) add_squares(sums, source + i);
  if (i != count) {
    T rest[kSums] = {};  // adding the square of zero changes no sum
    std::memcpy(rest, source + i, (count - i) * sizeof(T));
    add_squares(sums, rest);
  }
  double lanes[kSums];
  for (std::size_t a = 0; a < kAccumulators; ++a) hn::StoreU(sums[a], F64(), lanes + a * kDoubles);
  for (std::size_t half = kSums / 2; half != 0; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

template <class T>
void sum_of_squares(const T* source, std::size_t count, double* block_sums) {
  for (std::size_t begin = 0; begin < count; begin += kSumBlock) {
    *block_sums++ = block_sum(source + begin, std::min(count - begin, kSumBlock));
  }
}

void sum_of_squares_fp32_cpu(const float* source, std::size_t count, double* block_sums) {
  sum_of_squares(source, count, block_sums);
}
void sum_of_squares_bf16_cpu(const std::uint16_t* source, std::size_t count, double* block_sums) {
  sum_of_squares(source, count, block_sums);
}

// Infinity and NaN have all exponent bits set: the largest exponent found tells. Signed lanes, since every instruction
// set has their maximum, and the exponent leaves the sign bit zero.
template <class Signed, class T>
bool all_finite(const T* source, std::size_t count, hn::TFromD<Signed> exponent_bits) {
  constexpr Signed d;
  constexpr hn::Rebind<T, Signed> loaded;
  constexpr std::size_t kWidth = hn::MaxLanes(d);
  constexpr std::size_t kCheckEvery = 64 * kWidth;  // elements between looks at the result
  const auto exponent = hn::Set(d, exponent_bits);
  std::size_t i = 0;
  while (i < count) {
    const std::size_t end = i + std::min(count - i, kCheckEvery);
    auto largest = hn::Zero(d);
    for (; end - i >= kWidth; i += kWidth) {
      largest = hn::Max(largest, hn::And(hn::BitCast(d, hn::LoadU(loaded, source + i)), exponent));
    }
    if (i != end) {
      T rest[kWidth] = {};
      std::memcpy(rest, source + i, (end - i) * sizeof(T));
      largest = hn::Max(largest, hn::And(hn::BitCast(d, hn::LoadU(loaded, rest)), exponent));
      i = end;
    }
    if (!hn::AllFalse(d, hn::Eq(largest, exponent))) return false;
  }
  return true;
}

bool all_finite_fp32_cpu(const float* source, std::size_t count) {
  return all_finite<hn::ScalableTag<std::int32_t>>(source, count, 0x7F800000);
}
bool all_finite_bf16_cpu(const std::uint16_t* source, std::size_t count) {
  return all_finite<hn::ScalableTag<std::int16_t>>(source, count, 0x7F80);
}

}  // namespace
}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {

HWY_EXPORT(accumulate_fp32_cpu);
HWY_EXPORT(accumulate_bf16_cpu);
HWY_EXPORT(sum_of_squares_fp32_cpu);
HWY_EXPORT(sum_of_squares_bf16_cpu);
HWY_EXPORT(all_finite_fp32_cpu);
HWY_EXPORT(all_finite_bf16_cpu);

void accumulate_fp32(float* destination, const float* source, float scale, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(accumulate_fp32_cpu)(destination, source, scale, count);
}
void accumulate_bf16(std::uint16_t* destination, const std::uint16_t* source, float scale, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(accumulate_bf16_cpu)(destination, source, scale, count);
}
void sum_of_squares_fp32(const float* source, std::size_t count, double* block_sums) {
  HWY_DYNAMIC_DISPATCH(sum_of_squares_fp32_cpu)(source, count, block_sums);
}
void sum_of_squares_bf16(const std::uint16_t* source, std::size_t count, double* block_sums) {
  HWY_DYNAMIC_DISPATCH(sum_of_squares_bf16_cpu)(source, count, block_sums);
}
bool all_finite_fp32(const float* source, std::size_t count) {
  return HWY_DYNAMIC_DISPATCH(all_finite_fp32_cpu)(source, count);
}
bool all_finite_bf16(const std::uint16_t* source, std::size_t count) {
  return HWY_DYNAMIC_DISPATCH(all_finite_bf16_cpu)(source, count);
}

}  // namespace ballast::kernels
#endif  // HWY_ONCE
