// 8-bit moments, compiled for every instruction set.
// SPDX-License-Identifier: Apache-2.0
#include "ballast/kernels/moments.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/moments.cc"
#include <hwy/foreach_target.h>  // before highway.h
#include <hwy/highway.h>

#include "cpu/moments-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {
namespace {

template <bool kSigned>
void encode(const float* source, std::byte* blocks, std::size_t count) {
  for (; count >= kMomentBlock; count -= kMomentBlock, source += kMomentBlock, blocks += kMomentBlockBytes) {
    encode_block<kSigned>(source, blocks);
  }
  if (count == 0) return;
  float values[kMomentBlock] = {};
  std::memcpy(values, source, count * sizeof(float));
  encode_block<kSigned>(values, blocks);
}

template <bool kSigned>
void decode(const std::byte* blocks, std::size_t first, float* destination, std::size_t count) {
  float values[kMomentBlock];
  for (std::size_t done = 0; done < count;) {
    const std::size_t within = (first + done) % kMomentBlock;
    const std::byte* const block = blocks + (first + done) / kMomentBlock * kMomentBlockBytes;
    const std::size_t part = std::min(kMomentBlock - within, count - done);
    if (part == kMomentBlock) {
      decode_block<kSigned>(block, destination + done);
    } else {
      decode_block<kSigned>(block, values);
      std::memcpy(destination + done, values + within, part * sizeof(float));
    }
    done += part;
  }
}

void encode_cpu(Moment moment, const float* source, std::byte* blocks, std::size_t count) {
  moment == Moment::exp_avg ? encode<true>(source, blocks, count) : encode<false>(source, blocks, count);
}
void decode_cpu(Moment moment, const std::byte* blocks, std::size_t first, float* destination, std::size_t count) {
  moment == Moment::exp_avg ? decode<true>(blocks, first, destination, count)
                            : decode<false>(blocks, first, destination, count);
}

}  // namespace
}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {

HWY_EXPORT(encode_cpu);
HWY_EXPORT(decode_cpu);

void fp32_to_int8_blocks(Moment moment, const float* source, std::byte* blocks, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(encode_cpu)(moment, source, blocks, count);
}
void int8_blocks_to_fp32(Moment moment, const std::byte* blocks, std::size_t first, float* destination,
                         std::size_t count) {
  HWY_DYNAMIC_DISPATCH(decode_cpu)(moment, blocks, first, destination, count);
}

}  // namespace ballast::kernels
#endif  // HWY_ONCE
