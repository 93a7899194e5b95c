// Compiled for every instruction set and picked at run time, as the kernels are.
// SPDX-License-Identifier: Apache-2.0
#include "micro/yardsticks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "micro/yardsticks.cc"
#include <hwy/foreach_target.h>  // before highway.h
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace ballast::yardsticks::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// The mask is a parameter so that the compiler cannot see that nothing changes.
void rewrite_cpu(std::uint8_t* data, std::size_t bytes, std::uint8_t mask) {
  const hn::ScalableTag<std::uint8_t> d;
  const std::size_t lanes = hn::Lanes(d);
  const auto masks = hn::Set(d, mask);
  std::size_t i = 0;
  for (; bytes - i >= lanes; i += lanes) hn::StoreU(hn::Xor(hn::LoadU(d, data + i), masks), d, data + i);
  for (; i < bytes; ++i) data[i] = static_cast<std::uint8_t>(data[i] ^ mask);
}

void unscale_cpu(const std::uint16_t* source, float scale, float* destination, std::size_t count) {
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> bits;
  const hn::Rebind<std::uint16_t, decltype(d)> half;
  const std::size_t lanes = hn::Lanes(d);
  const auto scales = hn::Set(d, scale);
  std::size_t i = 0;
  for (; count - i >= lanes; i += lanes) {
    const auto wide = hn::ShiftLeft<16>(hn::PromoteTo(bits, hn::LoadU(half, source + i)));
    hn::StoreU(hn::Mul(hn::BitCast(d, wide), scales), d, destination + i);
  }
  const hn::CappedTag<float, 1> one;
  const hn::RebindToUnsigned<decltype(one)> one_bits;
  for (; i < count; ++i) {
    const auto wide = hn::Set(one_bits, static_cast<std::uint32_t>(source[i]) << 16);
    hn::StoreU(hn::Mul(hn::BitCast(one, wide), hn::Set(one, scale)), one, destination + i);
  }
}

}  // namespace
}  // namespace ballast::yardsticks::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::yardsticks {

HWY_EXPORT(rewrite_cpu);
HWY_EXPORT(unscale_cpu);

void rewrite(void* data, std::size_t bytes) {
  static volatile std::uint8_t nothing = 0;
  HWY_DYNAMIC_DISPATCH(rewrite_cpu)(static_cast<std::uint8_t*>(data), bytes, nothing);
}

void unscale_bf16(const std::uint16_t* source, float scale, float* destination, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(unscale_cpu)(source, scale, destination, count);
}

}  // namespace ballast::yardsticks
#endif  // HWY_ONCE
