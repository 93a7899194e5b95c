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
// The loops take two vectors at a time, so that their 16-bit halves fill one.
inline constexpr std::size_t kStep = 2 * kLanes;

HWY_INLINE Vu bits_of(Vf value) { return hn::BitCast(U32(), value); }
HWY_INLINE Vf float_of(Vu bits) { return hn::BitCast(F32(), bits); }
HWY_INLINE Vu constant(std::uint32_t value) { return hn::Set(U32(), value); }
HWY_INLINE Vu select(hn::Mask<U32> mask, Vu yes, Vu no) { return hn::IfThenElse(mask, yes, no); }
HWY_INLINE hn::Mask<U32> is_nan(Vf value) { return hn::RebindMask(U32(), hn::IsNaN(value)); }

HWY_INLINE Vu load_16(const std::uint16_t* source) { return hn::PromoteTo(U32(), hn::LoadU(U16(), source)); }

#if HWY_TARGET == HWY_SCALAR
struct Halves {
  hn::Vec<U16> first, second;
};
HWY_INLINE Halves lower_halves(Vu first, Vu second) {
  return {hn::TruncateTo(U16(), first), hn::TruncateTo(U16(), second)};
}
HWY_INLINE Halves upper_halves(Vu first, Vu second) {
  return lower_halves(hn::ShiftRight<16>(first), hn::ShiftRight<16>(second));
}
HWY_INLINE void store(Halves halves, std::uint16_t* destination) {
  hn::StoreU(halves.first, U16(), destination);
  hn::StoreU(halves.second, U16(), destination + kLanes);
}
#else
using Full16 = hn::Repartition<std::uint16_t, F32>;
using Halves = hn::Vec<Full16>;
HWY_INLINE Halves lower_halves(Vu first, Vu second) {
  return hn::ConcatEven(Full16(), hn::BitCast(Full16(), second), hn::BitCast(Full16(), first));
}
HWY_INLINE Halves upper_halves(Vu first, Vu second) {
  return hn::ConcatOdd(Full16(), hn::BitCast(Full16(), second), hn::BitCast(Full16(), first));
}
HWY_INLINE void store(Halves halves, std::uint16_t* destination) { hn::StoreU(halves, Full16(), destination); }
#endif

// Lanes by their storage type: fp32 arrays are float, bf16 arrays std::uint16_t.
HWY_INLINE Vf load(const float* source) { return hn::LoadU(F32(), source); }
HWY_INLINE Vf load(const std::uint16_t* source) { return float_of(hn::ShiftLeft<16>(load_16(source))); }

// The value that a type of storage keeps.
HWY_INLINE Vf as_stored(Vf value, const float*) { return value; }
HWY_INLINE Vf as_stored(Vf value, const std::uint16_t*) {
  const Vu bits = bits_of(value);
  // Half a unit, a little less where the last kept bit is even: ties go there.
  const auto odd = hn::TestBit(bits, constant(0x10000));
  const Vu rounded = hn::Add(bits, select(odd, constant(0x8000), constant(0x7FFF)));
  const Vu quiet = hn::Or(bits, constant(0x00400000));
  return float_of(hn::And(select(is_nan(value), quiet, rounded), constant(0xFFFF0000U)));
}

// Two vectors of what as_stored gave.
HWY_INLINE void store(Vf first, Vf second, float* destination) {
  hn::StoreU(first, F32(), destination);
  hn::StoreU(second, F32(), destination + kLanes);
}
HWY_INLINE void store(Vf first, Vf second, std::uint16_t* destination) {
  store(upper_halves(bits_of(first), bits_of(second)), destination);
}

// The split form of convert.h: ties away from zero, so that adding the signed remainder gives the bits back.
HWY_INLINE Vu split_round(Vf value) {
  const Vu bits = bits_of(value);
  return select(is_nan(value), hn::Or(bits, constant(0x00400000)), hn::Add(bits, constant(0x8000)));
}
HWY_INLINE void split_store(Vf first, Vf second, std::uint16_t* parameter, std::uint16_t* remainder,
                            std::uint16_t* published) {
  const Halves halves = upper_halves(split_round(first), split_round(second));
  store(halves, parameter);
  if (published != nullptr) store(halves, published);
  store(lower_halves(bits_of(first), bits_of(second)), remainder);
}

HWY_INLINE Vf merge_load(const std::uint16_t* parameter, const std::uint16_t* remainder) {
  const Vu upper = hn::ShiftLeft<16>(load_16(parameter));
  const auto half = hn::BitCast(I16(), hn::LoadU(U16(), remainder));
  const Vu bits = hn::Add(upper, hn::BitCast(U32(), hn::PromoteTo(I32(), half)));
  // The halves of a NaN were cut, not rounded: a borrow would carry it out of the NaNs, or make it signal.
  const Vu joined = hn::Or(upper, hn::And(bits, constant(0xFFFF)));
  return float_of(select(is_nan(float_of(upper)), joined, bits));
}

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2 && !defined(HWY_DISABLE_F16C)

HWY_INLINE Vf load_fp16(const std::uint16_t* source) {
  using F16 = hn::Rebind<hwy::float16_t, F32>;
  return hn::PromoteTo(F32(), hn::BitCast(F16(), hn::LoadU(U16(), source)));
}
HWY_INLINE void store_fp16(Vf first, Vf second, std::uint16_t* destination) {
  using F16 = hn::Rebind<hwy::float16_t, F32>;
  hn::StoreU(hn::BitCast(U16(), hn::DemoteTo(F16(), first)), U16(), destination);
  hn::StoreU(hn::BitCast(U16(), hn::DemoteTo(F16(), second)), U16(), destination + kLanes);
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
// In the low halves; the upper halves are zero.
HWY_INLINE Vu fp16_round(Vf value) {
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
  return hn::Or(half, sign);
}
HWY_INLINE void store_fp16(Vf first, Vf second, std::uint16_t* destination) {
  store(lower_halves(fp16_round(first), fp16_round(second)), destination);
}

#endif

}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
