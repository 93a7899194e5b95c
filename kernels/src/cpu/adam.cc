// Adam and AdamW: one loop, compiled for every instruction set and for each combination of storage formats.
// SPDX-License-Identifier: Apache-2.0
#include "ballast/kernels/adam.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/adam.cc"
#include <hwy/foreach_target.h>  // before highway.h
#include <hwy/highway.h>

#include "cpu/lanes-inl.h"

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
  store_fp32(a, as);
  store_fp32(b, bs);
  store_fp32(c, cs);
  store_fp32(d, ds);
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    as[lane] = static_cast<float>(double{as[lane]} * double{bs[lane]} + double{cs[lane]} * double{ds[lane]});
  }
  return load_fp32(as);
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

// One vector of elements from index i.
template <bool kL2, class S, ParameterFormat kFormat>
HWY_INLINE void update(const Constants& c, const S& s, std::integral_constant<ParameterFormat, kFormat>,
                       std::size_t i) {
  Vf p;
  if constexpr (kFormat == ParameterFormat::split_bf16) {
    p = merge_load(s.parameter + i, s.master + i);
  } else if constexpr (kFormat == ParameterFormat::fp16) {
    p = load_fp32(s.master + i);
  } else {
    p = load_fp32(s.parameter + i);
  }

  Vf g = load_fp32(s.gradient + i);
  if constexpr (kL2) {
    g = sum_of_products(g, c.gradient_scale, p, c.l2_decay);
  } else {
    g = hn::Mul(g, c.gradient_scale);
  }
  p = hn::Mul(p, c.decay_factor);

  Vf m = load_fp32(s.exp_avg + i);
  m = hn::Add(hn::Mul(c.beta1, m), hn::Mul(c.one_minus_beta1, g));
  Vf v = load_fp32(s.exp_avg_sq + i);
  v = hn::Add(hn::Mul(c.beta2, v), hn::Mul(c.one_minus_beta2, hn::Mul(g, g)));
  store_fp32(m, s.exp_avg + i);
  store_fp32(v, s.exp_avg_sq + i);
  m = as_stored(m, s.exp_avg);
  v = as_stored(v, s.exp_avg_sq);

  const Vf step = hn::Mul(c.step_size, m);
  const Vf denominator = hn::Add(hn::Mul(hn::Sqrt(v), c.inverse_sqrt_correction2), c.epsilon);
  // A step of zero keeps p's bits, -0 among them, and makes 0 / 0 (no gradient yet, epsilon 0) no step.
  const auto stays = hn::Eq(step, hn::Zero(F32()));
  p = hn::IfThenElse(stays, p, hn::Sub(p, hn::Div(step, denominator)));

  auto* const published = s.published == nullptr ? nullptr : s.published + i;
  if constexpr (kFormat == ParameterFormat::split_bf16) {
    split_store(p, s.parameter + i, s.master + i, published);
  } else if constexpr (kFormat == ParameterFormat::fp16) {
    store_fp32(p, s.master + i);
    store_fp16(p, s.parameter + i);
    if (published != nullptr) store_fp16(p, published);
  } else {
    store_fp32(p, s.parameter + i);
    if (published != nullptr) store_fp32(p, published);
  }
}

template <class T>
void copy_elements(T* destination, const T* source, std::size_t count) {
  if (destination != nullptr && source != nullptr) std::memcpy(destination, source, count * sizeof(T));
}

template <bool kL2, ParameterFormat kFormat, ElementType kMoment, ElementType kGradient>
void update_range(const AdamScalars& scalars, const AdamArrays& arrays, std::size_t count) {
  using S = Streams<kFormat, kMoment, kGradient>;
  constexpr std::integral_constant<ParameterFormat, kFormat> kTag;
  const Constants constants(scalars);
  const S s{
      static_cast<typename S::Parameter*>(arrays.parameter),     static_cast<typename S::Master*>(arrays.master),
      static_cast<typename S::Moment*>(arrays.exp_avg),          static_cast<typename S::Moment*>(arrays.exp_avg_sq),
      static_cast<const typename S::Gradient*>(arrays.gradient), static_cast<typename S::Parameter*>(arrays.published)};

  std::size_t i = 0;
  for (; count - i >= kLanes; i += kLanes) update<kL2>(constants, s, kTag, i);

  const std::size_t rest = count - i;
  if (rest == 0) return;
  // The tail runs the same code on copies, so its bits cannot differ and nothing outside the arrays is touched.
  alignas(64) typename S::Parameter parameter[kLanes] = {};
  alignas(64) typename S::Master master[kLanes] = {};
  alignas(64) typename S::Moment exp_avg[kLanes] = {};
  alignas(64) typename S::Moment exp_avg_sq[kLanes] = {};
  alignas(64) typename S::Gradient gradient[kLanes] = {};
  constexpr bool kHasMaster = kFormat != ParameterFormat::fp32;
  copy_elements(parameter, s.parameter + i, rest);
  if constexpr (kHasMaster) copy_elements(master, s.master + i, rest);
  copy_elements(exp_avg, s.exp_avg + i, rest);
  copy_elements(exp_avg_sq, s.exp_avg_sq + i, rest);
  copy_elements(gradient, s.gradient + i, rest);
  update<kL2>(constants, S{parameter, master, exp_avg, exp_avg_sq, gradient, nullptr}, kTag, 0);
  copy_elements(s.parameter + i, parameter, rest);
  if constexpr (kHasMaster) copy_elements(s.master + i, master, rest);
  copy_elements(s.exp_avg + i, exp_avg, rest);
  copy_elements(s.exp_avg_sq + i, exp_avg_sq, rest);
  if (s.published != nullptr) copy_elements(s.published + i, parameter, rest);
}

template <ParameterFormat kFormat, ElementType kMoment, ElementType kGradient>
void update_decay(const AdamScalars& scalars, const AdamArrays& arrays, std::size_t count) {
  // Without L2 the term is left out: 0 * p is NaN where p is infinite.
  if (scalars.l2_decay != 0.0F) {
    update_range<true, kFormat, kMoment, kGradient>(scalars, arrays, count);
  } else {
    update_range<false, kFormat, kMoment, kGradient>(scalars, arrays, count);
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
