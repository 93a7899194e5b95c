// Vectors of fp32 lanes from and to each storage format, the same bits on every instruction set. Included once per
// instruction set by the loops beside it; bf16 and fp16 arrays are std::uint16_t.
// SPDX-License-Identifier: Apache-2.0

// A toggle in place of a plain include guard: the file is compiled again for each instruction set.
#if defined(BALLAST_KERNELS_LANES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef BALLAST_KERNELS_LANES_INL_H
#undef BALLAST_KERNELS_LANES_INL_H
#else
#define BALLAST_KERNELS_LANES_INL_H
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::RebindToUnsigned<F32>;
using I32 = hn::RebindToSigned<F32>;
using U16 = hn::Rebind<std::uint16_t, F32>;  // as many lanes as F32, half the bytes
using I16 = hn::Rebind<std::int16_t, F32>;
using Vf = hn::Vec<F32>;
using Vu = hn::Vec<U32>;

inline constexpr std::size_t kLanes = hn::MaxLanes(F32());

HWY_INLINE Vu bits_of(Vf value) { return hn::BitCast(U32(), value); }
HWY_INLINE Vf float_of(Vu bits) { return hn::BitCast(F32(), bits); }
HWY_INLINE Vu constant(std::uint32_t value) { return hn::Set(U32(), value); }
HWY_INLINE Vu select(hn::Mask<U32> mask, Vu yes, Vu no) { return hn::IfThenElse(mask, yes, no); }
HWY_INLINE hn::Mask<U32> is_nan(Vf value) { return hn::RebindMask(U32(), hn::IsNaN(value)); }

HWY_INLINE Vu load_16(const std::uint16_t* source) { return hn::PromoteTo(U32(), hn::LoadU(U16(), source)); }
// Stores the low halves.
HWY_INLINE void store_16(Vu value, std::uint16_t* destination) {
  hn::StoreU(hn::TruncateTo(U16(), value), U16(), destination);
}

HWY_INLINE Vf bf16_widen(Vu half) { return float_of(hn::ShiftLeft<16>(half)); }

// bf16 in the low halves; the upper halves are zero.
HWY_INLINE Vu bf16_round(Vf value) {
  const Vu bits = bits_of(value);
  const Vu upper = hn::ShiftRight<16>(bits);
  const Vu odd = hn::And(upper, constant(1));
  const Vu rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, constant(0x7FFF))));
  return select(is_nan(value), hn::Or(upper, constant(0x40)), rounded);
}

// Lanes by their storage type: fp32 arrays are float, bf16 arrays std::uint16_t.
HWY_INLINE Vf load_fp32(const float* source) { return hn::LoadU(F32(), source); }
HWY_INLINE Vf load_fp32(const std::uint16_t* source) { return bf16_widen(load_16(source)); }
HWY_INLINE void store_fp32(Vf value, float* destination) { hn::StoreU(value, F32(), destination); }
HWY_INLINE void store_fp32(Vf value, std::uint16_t* destination) { store_16(bf16_round(value), destination); }
// What a load after the store gives.
HWY_INLINE Vf as_stored(Vf value, const float*) { return value; }
HWY_INLINE Vf as_stored(Vf value, const std::uint16_t*) { return bf16_widen(bf16_round(value)); }

// The split form of convert.h: ties away from zero, so that adding the signed remainder gives the bits back.
HWY_INLINE void split_store(Vf value, std::uint16_t* parameter, std::uint16_t* remainder, std::uint16_t* published) {
  const Vu bits = bits_of(value);
  const Vu rounded = hn::ShiftRight<16>(hn::Add(bits, constant(0x8000)));
  const Vu quiet = hn::Or(hn::ShiftRight<16>(bits), constant(0x40));
  const auto half = hn::TruncateTo(U16(), select(is_nan(value), quiet, rounded));
  hn::StoreU(half, U16(), parameter);
  if (published != nullptr) hn::StoreU(half, U16(), published);
  store_16(bits, remainder);
}

HWY_INLINE Vf merge_load(const std::uint16_t* parameter, const std::uint16_t* remainder) {
  const Vu upper = hn::ShiftLeft<16>(load_16(parameter));
  const auto half = hn::LoadU(U16(), remainder);
  const Vu plain = hn::PromoteTo(U32(), half);
  const Vu with_sign = hn::BitCast(U32(), hn::PromoteTo(I32(), hn::BitCast(I16(), half)));
  // The halves of a NaN were cut, not rounded: a borrow would carry it out of the NaNs, or make it signal.
  return float_of(select(is_nan(float_of(upper)), hn::Or(upper, plain), hn::Add(upper, with_sign)));
}

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2 && !defined(HWY_DISABLE_F16C)

HWY_INLINE Vf load_fp16(const std::uint16_t* source) {
  using F16 = hn::Rebind<hwy::float16_t, F32>;
  return hn::PromoteTo(F32(), hn::BitCast(F16(), hn::LoadU(U16(), source)));
}
HWY_INLINE void store_fp16(Vf value, std::uint16_t* destination) {
  using F16 = hn::Rebind<hwy::float16_t, F32>;
  hn::StoreU(hn::BitCast(U16(), hn::DemoteTo(F16(), value)), U16(), destination);
}

#else

// In integers, with the results of the instructions above (Highway's own form cuts where those round).
HWY_INLINE Vf load_fp16(const std::uint16_t* source) {
  const Vu half = load_16(source);
  const Vu magnitude = hn::ShiftLeft<13>(hn::And(half, constant(0x7FFF)));
  const Vu exponent = hn::And(magnitude, constant(0x0F800000));
  const Vu normal = hn::Add(magnitude, constant((127 - 15) << 23));
  const Vu special = hn::Add(normal, constant((128 - 16) << 23));
  const Vu quiet = hn::Or(special, constant(0x00400000));
  // A subnormal is its mantissa behind an implicit one, less that one.
  const Vu one = constant(113 << 23);
  const Vu subnormal = bits_of(hn::Sub(float_of(hn::Add(magnitude, one)), float_of(one)));
  const auto not_finite = hn::Eq(exponent, constant(0x0F800000));
  const auto has_payload = hn::Ne(hn::And(magnitude, constant(0x007FFFFF)), constant(0));
  Vu bits = select(hn::Eq(exponent, constant(0)), subnormal, normal);
  bits = select(not_finite, special, bits);
  bits = select(hn::And(not_finite, has_payload), quiet, bits);
  return float_of(hn::Or(bits, hn::ShiftLeft<16>(hn::And(half, constant(0x8000)))));
}
HWY_INLINE void store_fp16(Vf value, std::uint16_t* destination) {
  const Vu bits = bits_of(value);
  const Vu sign = hn::ShiftRight<16>(hn::And(bits, constant(0x80000000U)));
  const Vu magnitude = hn::And(bits, constant(0x7FFFFFFF));
  const Vu odd = hn::And(hn::ShiftRight<13>(magnitude), constant(1));
  const Vu rebiased = hn::Sub(magnitude, constant((127 - 15) << 23));
  const Vu normal = hn::ShiftRight<13>(hn::Add(rebiased, hn::Add(odd, constant(0xFFF))));
  // Adding 2^-1 leaves a subnormal's bits, rounded to nearest even, at the end of the mantissa.
  const Vu half_one = constant(126 << 23);
  const Vu subnormal = hn::Sub(bits_of(hn::Add(float_of(magnitude), float_of(half_one))), half_one);
  const Vu quiet = hn::Or(constant(0x7E00), hn::And(hn::ShiftRight<13>(magnitude), constant(0x3FF)));
  const auto below = hn::Lt(hn::BitCast(I32(), magnitude), hn::Set(I32(), 113 << 23));
  const auto above = hn::Gt(hn::BitCast(I32(), magnitude), hn::Set(I32(), (143 << 23) - 1));
  Vu half = select(hn::RebindMask(U32(), below), subnormal, normal);
  half = select(hn::RebindMask(U32(), above), constant(0x7C00), half);
  half = select(is_nan(value), quiet, half);
  store_16(hn::Or(half, sign), destination);
}

#endif

}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
