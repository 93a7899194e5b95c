// Sixteen floats at a time, written once in the compilers' vector extension and compiled for three instruction sets.
// Always sixteen lanes, multiply and add apart, lane sums folded in one order: the same bits on each of them.
//
// Everything here is inlined into functions that name their target (on_isa below); nothing is compiled for more than
// the CPU at hand has, and no such vector crosses a call (hence -Wno-psabi for the one file that includes this).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>

#include "rows.h"

#define BALLAST_GPT_INLINE inline __attribute__((always_inline))

namespace ballast::gpt {

namespace simd {

constexpr std::int64_t kLanes = 16;
typedef float F16 __attribute__((vector_size(64)));
typedef std::int32_t I16 __attribute__((vector_size(64)));
typedef std::uint32_t U16 __attribute__((vector_size(64)));
typedef std::uint16_t H16 __attribute__((vector_size(32)));

BALLAST_GPT_INLINE F16 splat(float x) { return F16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
BALLAST_GPT_INLINE F16 select(I16 mask, F16 yes, F16 no) { return (F16)((mask & (I16)yes) | (~mask & (I16)no)); }
BALLAST_GPT_INLINE F16 maximum(F16 a, F16 b) { return select(a > b, a, b); }

BALLAST_GPT_INLINE F16 widen(H16 h) { return (F16)(__builtin_convertvector(h, U16) << 16); }
// Nearest even; NaN stays NaN.
BALLAST_GPT_INLINE H16 narrow(F16 x) {
  const U16 bits = (U16)x;
  const U16 rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
  const U16 nan = bits | 0x00400000u;
  const U16 is_nan = (U16)(x != x);
  return __builtin_convertvector(((is_nan & nan) | (~is_nan & rounded)) >> 16, H16);
}
// IEEE half precision: exact, subnormals included.
BALLAST_GPT_INLINE F16 widen_half(H16 h) {
  const U16 bits = __builtin_convertvector(h, U16);
  const U16 magnitude = (bits & 0x7FFFu) << 13;
  const U16 special = (U16)((bits & 0x7C00u) == 0x7C00u);
  const F16 scaled = (F16)magnitude * splat(0x1p112f);
  const U16 finite = (U16)scaled;
  const U16 value = (special & (magnitude | 0x7F800000u)) | (~special & finite);
  return (F16)(value | ((bits & 0x8000u) << 16));
}

BALLAST_GPT_INLINE F16 load(const float* p) {
  F16 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
BALLAST_GPT_INLINE F16 load(const Bf16* p) {
  H16 h;
  std::memcpy(&h, p, sizeof h);
  return widen(h);
}
BALLAST_GPT_INLINE void store(float* p, F16 x) { std::memcpy(p, &x, sizeof x); }
BALLAST_GPT_INLINE void store(Bf16* p, F16 x) {
  const H16 h = narrow(x);
  std::memcpy(p, &h, sizeof h);
}
// The first n lanes (0 < n < 16); the others are zero.
template <class T>
BALLAST_GPT_INLINE F16 load_part(const T* p, std::int64_t n) {
  T part[kLanes];
  for (std::int64_t i = 0; i < kLanes; ++i) part[i] = i < n ? p[i] : T{};
  return load(part);
}
template <class T>
BALLAST_GPT_INLINE void store_part(T* p, F16 x, std::int64_t n) {
  T part[kLanes];
  store(part, x);
  for (std::int64_t i = 0; i < n; ++i) p[i] = part[i];
}
// All lanes of one block of a row: whole, or its last part.
template <class T>
BALLAST_GPT_INLINE F16 load_n(const T* p, std::int64_t n) {
  return n >= kLanes ? load(p) : load_part(p, n);
}
template <class T>
BALLAST_GPT_INLINE void store_n(T* p, F16 x, std::int64_t n) {
  if (n >= kLanes) {
    store(p, x);
  } else {
    store_part(p, x, n);
  }
}

BALLAST_GPT_INLINE float sum_lanes(F16 x) {
  float a[8], lanes[16];
  std::memcpy(lanes, &x, sizeof lanes);
  for (int i = 0; i < 8; ++i) a[i] = lanes[i] + lanes[i + 8];
  return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}
BALLAST_GPT_INLINE float max_lanes(F16 x) {
  float lanes[16];
  std::memcpy(lanes, &x, sizeof lanes);
  float m = lanes[0];
  for (int i = 1; i < 16; ++i) m = lanes[i] > m ? lanes[i] : m;
  return m;
}

// e^x within 2 ulp for x in [-87, 88]; clamped outside; NaN stays NaN.
BALLAST_GPT_INLINE F16 exponential(F16 x) {
  const F16 low = splat(-87.0f), high = splat(88.0f);
  F16 y = select(x < low, low, x);
  y = select(y > high, high, y);
  const F16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F16 shifted = y * splat(1.44269504f) + magic;
  const F16 n = shifted - magic;
  const F16 r = (y - n * splat(0.693359375f)) - n * splat(-2.12194440e-4f);
  F16 p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = (p * (r * r) + r) + splat(1.0f);
  const I16 exponent = ((I16)shifted - (I16)magic + 127) << 23;
  return p * (F16)exponent;
}

}  // namespace simd

enum class Isa : std::uint8_t { baseline, avx2, avx512 };
// The best that this CPU (and ONEDNN_MAX_CPU_ISA, so that a test can ask for less) permits.
Isa isa();

#if defined(__x86_64__)
#if defined(__clang__)
#define BALLAST_GPT_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"), min_vector_width(512)))
#else
#define BALLAST_GPT_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")))
#endif
template <class Kernel, class... Arguments>
BALLAST_GPT_AVX512 void on_avx512(Arguments... a) {
  Kernel::run(a...);
}
template <class Kernel, class... Arguments>
__attribute__((target("avx2"))) void on_avx2(Arguments... a) {
  Kernel::run(a...);
}
#endif
// Runs Kernel::run (always inlined) compiled for the chosen instruction set.
template <class Kernel, class... Arguments>
void on_isa(Arguments... a) {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::avx512:
      return on_avx512<Kernel>(a...);
    case Isa::avx2:
      return on_avx2<Kernel>(a...);
    case Isa::baseline:
      break;
  }
#endif
  Kernel::run(a...);
}

}  // namespace ballast::gpt
