// Number formats one value at a time, for device and host alike: the results of kernels/src/cpu/lanes-inl.h.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <math.h>

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define BALLAST_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define BALLAST_HOST_DEVICE inline
#endif

namespace ballast::kernels::cuda {

BALLAST_HOST_DEVICE std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
BALLAST_HOST_DEVICE float float_of(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
BALLAST_HOST_DEVICE bool is_nan_bits(std::uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }

BALLAST_HOST_DEVICE float bf16_value(std::uint16_t half) { return float_of(std::uint32_t{half} << 16); }
BALLAST_HOST_DEVICE std::uint16_t bf16_rounded(float value) {
  const std::uint32_t bits = bits_of(value);
  // Half a unit, a little less where the last kept bit is even: ties go there.
  const std::uint32_t rounded = bits + ((bits & 0x10000u) != 0 ? 0x8000u : 0x7FFFu);
  return static_cast<std::uint16_t>((is_nan_bits(bits) ? (bits | 0x00400000u) : rounded) >> 16);
}

// What an array of either type holds, and what it keeps of a value. bf16 arrays are std::uint16_t.
BALLAST_HOST_DEVICE float loaded(float stored) { return stored; }
BALLAST_HOST_DEVICE float loaded(std::uint16_t stored) { return bf16_value(stored); }
BALLAST_HOST_DEVICE void keep(float value, float& stored) { stored = value; }
BALLAST_HOST_DEVICE void keep(float value, std::uint16_t& stored) { stored = bf16_rounded(value); }

// The split form of convert.h.
BALLAST_HOST_DEVICE void split(float value, std::uint16_t& parameter, std::uint16_t& remainder) {
  const std::uint32_t bits = bits_of(value);
  parameter = static_cast<std::uint16_t>((is_nan_bits(bits) ? (bits | 0x00400000u) : bits + 0x8000u) >> 16);
  remainder = static_cast<std::uint16_t>(bits);
}
BALLAST_HOST_DEVICE float merge(std::uint16_t parameter, std::uint16_t remainder) {
  const std::uint32_t upper = std::uint32_t{parameter} << 16;
  const std::uint32_t signed_half = (remainder ^ 0x8000u) - 0x8000u;  // sign-extended
  const std::uint32_t bits = upper + signed_half;
  // The halves of a NaN were cut, not rounded.
  return float_of(is_nan_bits(upper) ? (upper | (bits & 0xFFFFu)) : bits);
}

BALLAST_HOST_DEVICE float fp16_value(std::uint16_t half) {
  const std::uint32_t magnitude = (half & 0x7FFFu) << 13;
  const std::uint32_t exponent = magnitude & 0x0F800000u;
  std::uint32_t bits;
  if (exponent == 0) {
    // A subnormal is its mantissa behind an implicit one, less that one.
    const std::uint32_t one = 113u << 23;
    bits = bits_of(float_of(magnitude + one) - float_of(one));
  } else {
    bits = magnitude + ((127u - 15u) << 23);
    if (exponent == 0x0F800000u) {
      bits += (128u - 16u) << 23;
      if ((magnitude & 0x007FFFFFu) != 0) bits |= 0x00400000u;
    }
  }
  return float_of(bits | (std::uint32_t{half} & 0x8000u) << 16);
}
BALLAST_HOST_DEVICE std::uint16_t fp16_rounded(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits & 0x80000000u) >> 16;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  std::uint32_t half;
  if (magnitude > 0x7F800000u) {
    half = 0x7E00u | ((magnitude >> 13) & 0x3FFu);
  } else if (magnitude >= (143u << 23)) {
    half = 0x7C00u;
  } else if (magnitude < (113u << 23)) {
    // Adding 2^-1 leaves a subnormal's bits, rounded to nearest even, at the end of the mantissa.
    const std::uint32_t half_one = 126u << 23;
    half = bits_of(float_of(magnitude) + float_of(half_one)) - half_one;
  } else {
    half = (magnitude - ((127u - 15u) << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return static_cast<std::uint16_t>(half | sign);
}

}  // namespace ballast::kernels::cuda
