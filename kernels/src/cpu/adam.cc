// Adam and AdamW: one loop, compiled for every instruction set and for each combination of storage formats.
// SPDX-License-Identifier: Apache-2.0
#include "ballast/kernels/adam.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/adam.cc"
#include <hwy/foreach_target.h>  // before highway.h
#include <hwy/highway.h>

#include "cpu/lanes-inl.h"
#include "cpu/moments-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {
namespace {

template <ElementType kType>
using Storage = std::conditional_t<kType == ElementType::fp32, float, std::uint16_t>;

template <ParameterFormat kFormat, ElementType kMoment, ElementType kGradient>
struct Streams {
  using Parameter = std::conditional_t<kFormat == ParameterFormat::fp32, float, std::uint16_t>;
  using Master = std::conditional_t<kFormat == ParameterFormat::fp16, float, std::uint16_t>;
  using Moment = Storage<kMoment>;
  using Gradient = Storage<kGradient>;

  Parameter* parameter;
  Master* master;
  Moment* exp_avg;
  Moment* exp_avg_sq;
  const Gradient* gradient;
  Parameter* published;
};

struct Constants {
  explicit Constants(const AdamScalars& s)
      : gradient_scale(hn::Set(F32(), s.gradient_scale)),
        beta1(hn::Set(F32(), s.beta1)),
        one_minus_beta1(hn::Set(F32(), s.one_minus_beta1)),
        beta2(hn::Set(F32(), s.beta2)),
        one_minus_beta2(hn::Set(F32(), s.one_minus_beta2)),
        step_size(hn::Set(F32(), s.step_size)),
        inverse_sqrt_correction2(hn::Set(F32(), s.inverse_sqrt_correction2)),
        epsilon(hn::Set(F32(), s.epsilon)),
        decay_factor(hn::Set(F32(), s.decay_factor)),
        l2_decay(hn::Set(F32(), s.l2_decay)) {}

  Vf gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2;
  Vf step_size, inverse_sqrt_correction2, epsilon, decay_factor, l2_decay;
};

// a * b + c * d of each lane, in double (where the products are exact) and rounded once: the terms may cancel, and v
// squares what they leave.
HWY_INLINE Vf sum_of_products(Vf a, Vf b, Vf c, Vf d) {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  // One lane has no halves, and the emulated narrowing makes infinity finite.
  float as[kLanes], bs[kLanes], cs[kLanes], ds[kLanes];
  hn::StoreU(a, F32(), as);
  hn::StoreU(b, F32(), bs);
  hn::StoreU(c, F32(), cs);
  hn::StoreU(d, F32(), ds);
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    as[lane] = static_cast<float>(double{as[lane]} * double{bs[lane]} + double{cs[lane]} * double{ds[lane]});
  }
  return load(as);
#else
  constexpr hn::Half<F32> half;
  constexpr hn::RepartitionToWide<F32> wide;
  const auto lower = [&](Vf v) HWY_ATTR { return hn::PromoteTo(wide, hn::LowerHalf(half, v)); };
  const auto upper = [&](Vf v) HWY_ATTR { return hn::PromoteTo(wide, hn::UpperHalf(half, v)); };
  const auto low = hn::Add(hn::Mul(lower(a), lower(b)), hn::Mul(lower(c), lower(d)));
  const auto high = hn::Add(hn::Mul(upper(a), upper(b)), hn::Mul(upper(c), upper(d)));
  return hn::Combine(F32(), hn::DemoteTo(half, high), hn::DemoteTo(half, low));
#endif
}

// One vector: from the old p, m and v and the gradient to the new ones, m and v as they are stored.
template <bool kL2, class Moment>
HWY_INLINE void step(const Constants& c, Vf g, const Moment* storage, Vf& p, Vf& m, Vf& v) {
  if constexpr (kL2) {
    g = sum_of_products(g, c.gradient_scale, p, c.l2_decay);
  } else {
    g = hn::Mul(g, c.gradient_scale);
  }
  p = hn::Mul(p, c.decay_factor);
  m = as_stored(hn::Add(hn::Mul(c.beta1, m), hn::Mul(c.one_minus_beta1, g)), storage);
  v = as_stored(hn::Add(hn::Mul(c.beta2, v), hn::Mul(c.one_minus_beta2, hn::Mul(g, g))), storage);

  const Vf change = hn::Mul(c.step_size, m);
  const Vf denominator = hn::Add(hn::Mul(hn::Sqrt(v), c.inverse_sqrt_correction2), c.epsilon);
  // A change of zero keeps p's bits, -0 among them, and makes 0 / 0 (no gradient yet, epsilon 0) no step.
  const auto stays = hn::Eq(change, hn::Zero(F32()));
  p = hn::IfThenElse(stays, p, hn::Sub(p, hn::Div(change, denominator)));
}

template <ParameterFormat kFormat, class S>
HWY_INLINE Vf load_parameter(const S& s, std::size_t i) {
  if constexpr (kFormat == ParameterFormat::split_bf16) {
    return merge_load(s.parameter + i, s.master + i);
  } else if constexpr (kFormat == ParameterFormat::fp16) {
    return load(s.master + i);
  } else {
    return load(s.parameter + i);
  }
}

template <ParameterFormat kFormat, class S>
HWY_INLINE void store_parameters(Vf first, Vf second, const S& s, std::size_t i) {
  auto* const published = s.published == nullptr ? nullptr : s.published + i;
  if constexpr (kFormat == ParameterFormat::split_bf16) {
    split_store(first, second, s.parameter + i, s.master + i, published);
  } else if constexpr (kFormat == ParameterFormat::fp16) {
    store(first, second, s.master + i);
    store_fp16(first, second, s.parameter + i);
    if (published != nullptr) store_fp16(first, second, published);
  } else {
    store(first, second, s.parameter + i);
    if (published != nullptr) store(first, second, published);
  }
}

// kStep elements from index i.
template <bool kL2, ParameterFormat kFormat, class S>
HWY_INLINE void update(const Constants& c, const S& s, std::size_t i) {
  const std::size_t j = i + kLanes;
  Vf p0 = load_parameter<kFormat>(s, i);
  Vf p1 = load_parameter<kFormat>(s, j);
  Vf m0 = load(s.exp_avg + i);
  Vf m1 = load(s.exp_avg + j);
  Vf v0 = load(s.exp_avg_sq + i);
  Vf v1 = load(s.exp_avg_sq + j);
  step<kL2>(c, load(s.gradient + i), s.exp_avg, p0, m0, v0);
  step<kL2>(c, load(s.gradient + j), s.exp_avg, p1, m1, v1);
  store(m0, m1, s.exp_avg + i);
  store(v0, v1, s.exp_avg_sq + i);
  store_parameters<kFormat>(p0, p1, s, i);
}

template <class T>
void copy_elements(T* destination, const T* source, std::size_t count) {
  if (destination != nullptr && source != nullptr) std::memcpy(destination, source, count * sizeof(T));
}

template <bool kL2, ParameterFormat kFormat, ElementType kMoment, ElementType kGradient>
void update_range(const Constants& constants, const AdamArrays& arrays, std::size_t count) {
  using S = Streams<kFormat, kMoment, kGradient>;
  const S s{
      static_cast<typename S::Parameter*>(arrays.parameter),     static_cast<typename S::Master*>(arrays.master),
      static_cast<typename S::Moment*>(arrays.exp_avg),          static_cast<typename S::Moment*>(arrays.exp_avg_sq),
      static_cast<const typename S::Gradient*>(arrays.gradient), static_cast<typename S::Parameter*>(arrays.published)};

  std::size_t i = 0;
  for (; count - i >= kStep; i += kStep) update<kL2, kFormat>(constants, s, i);

  const std::size_t rest = count - i;
  if (rest == 0) return;
  // The tail runs the same code on copies, so its bits cannot differ and nothing outside the arrays is touched.
  alignas(64) typename S::Parameter parameter[kStep] = {};
  alignas(64) typename S::Master master[kStep] = {};
  alignas(64) typename S::Moment exp_avg[kStep] = {};
  alignas(64) typename S::Moment exp_avg_sq[kStep] = {};
  alignas(64) typename S::Gradient gradient[kStep] = {};
  constexpr bool kHasMaster = kFormat != ParameterFormat::fp32;
  copy_elements(parameter, s.parameter + i, rest);
  if constexpr (kHasMaster) copy_elements(master, s.master + i, rest);
  copy_elements(exp_avg, s.exp_avg + i, rest);
  copy_elements(exp_avg_sq, s.exp_avg_sq + i, rest);
  copy_elements(gradient, s.gradient + i, rest);
  update<kL2, kFormat>(constants, S{parameter, master, exp_avg, exp_avg_sq, gradient, nullptr}, 0);
  copy_elements(s.parameter + i, parameter, rest);
  if constexpr (kHasMaster) copy_elements(s.master + i, master, rest);
  copy_elements(s.exp_avg + i, exp_avg, rest);
  copy_elements(s.exp_avg_sq + i, exp_avg_sq, rest);
  if (s.published != nullptr) copy_elements(s.published + i, parameter, rest);
}

template <class T, class Pointer>
Pointer advanced(Pointer pointer, std::size_t elements) {
  using Element = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const T, T>;
  return pointer == nullptr ? nullptr : static_cast<Element*>(pointer) + elements;
}

// 8-bit moments: block by block over fp32 copies of them, which stay in the nearest cache.
template <bool kL2, ParameterFormat kFormat, ElementType kGradient>
void update_blocks(const Constants& constants, const AdamArrays& arrays, std::size_t count) {
  using S = Streams<kFormat, ElementType::fp32, kGradient>;
  alignas(64) float exp_avg[kMomentBlock];
  alignas(64) float exp_avg_sq[kMomentBlock];
  for (std::size_t begin = 0; begin < count; begin += kMomentBlock) {
    const std::size_t part = std::min(kMomentBlock, count - begin);
    const std::size_t offset = begin / kMomentBlock * kMomentBlockBytes;
    std::byte* const m = static_cast<std::byte*>(arrays.exp_avg) + offset;
    std::byte* const v = static_cast<std::byte*>(arrays.exp_avg_sq) + offset;
    decode_block<true>(m, exp_avg);
    decode_block<false>(v, exp_avg_sq);
    AdamArrays block;
    block.parameter = advanced<typename S::Parameter>(arrays.parameter, begin);
    block.master = advanced<typename S::Master>(arrays.master, begin);
    block.exp_avg = exp_avg;
    block.exp_avg_sq = exp_avg_sq;
    block.gradient = advanced<typename S::Gradient>(arrays.gradient, begin);
    block.published = advanced<typename S::Parameter>(arrays.published, begin);
    update_range<kL2, kFormat, ElementType::fp32, kGradient>(constants, block, part);
    std::fill(exp_avg + part, exp_avg + kMomentBlock, 0.0F);
    std::fill(exp_avg_sq + part, exp_avg_sq + kMomentBlock, 0.0F);
    encode_block<true>(exp_avg, m);
    encode_block<false>(exp_avg_sq, v);
  }
}

template <bool kL2, ParameterFormat kFormat, ElementType kMoment, ElementType kGradient>
void update_stored(const AdamScalars& scalars, const AdamArrays& arrays, std::size_t count) {
  const Constants constants(scalars);
  if constexpr (kMoment == ElementType::int8) {
    update_blocks<kL2, kFormat, kGradient>(constants, arrays, count);
  } else {
    update_range<kL2, kFormat, kMoment, kGradient>(constants, arrays, count);
  }
}

template <ParameterFormat kFormat, ElementType kMoment, ElementType kGradient>
void update_decay(const AdamScalars& scalars, const AdamArrays& arrays, std::size_t count) {
  // Without L2 the term is left out: 0 * p is NaN where p is infinite.
  if (scalars.l2_decay != 0.0F) {
    update_stored<true, kFormat, kMoment, kGradient>(scalars, arrays, count);
  } else {
    update_stored<false, kFormat, kMoment, kGradient>(scalars, arrays, count);
  }
}

template <ParameterFormat kFormat, ElementType kMoment>
void update_gradient(const AdamScalars& scalars, const AdamArrays& arrays, std::size_t count) {
  if (arrays.gradient_type == ElementType::fp32) {
    update_decay<kFormat, kMoment, ElementType::fp32>(scalars, arrays, count);
  } else {
    update_decay<kFormat, kMoment, ElementType::bf16>(scalars, arrays, count);
  }
}

template <ParameterFormat kFormat>
void update_moment(const AdamScalars& scalars, const AdamArrays& arrays, std::size_t count) {
  if (arrays.moment_type == ElementType::fp32) {
    update_gradient<kFormat, ElementType::fp32>(scalars, arrays, count);
  } else if (arrays.moment_type == ElementType::int8) {
    update_gradient<kFormat, ElementType::int8>(scalars, arrays, count);
  } else {
    update_gradient<kFormat, ElementType::bf16>(scalars, arrays, count);
  }
}

void adam_cpu(const AdamScalars& scalars, const AdamArrays& arrays, std::size_t count) {
  switch (arrays.parameter_format) {
    case ParameterFormat::split_bf16:
      return update_moment<ParameterFormat::split_bf16>(scalars, arrays, count);
    case ParameterFormat::fp16:
      return update_moment<ParameterFormat::fp16>(scalars, arrays, count);
    case ParameterFormat::fp32:
      return update_moment<ParameterFormat::fp32>(scalars, arrays, count);
  }
}

}  // namespace
}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {

HWY_EXPORT(adam_cpu);

void adam(const AdamScalars& scalars, const AdamArrays& arrays, std::size_t count) {
  if (count == 0) return;
  HWY_DYNAMIC_DISPATCH(adam_cpu)(scalars, arrays, count);
}

}  // namespace ballast::kernels
#endif  // HWY_ONCE
