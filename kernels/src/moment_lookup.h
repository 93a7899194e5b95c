// The parts of 8-bit moments that look things up, element by element: of plain instructions only, as a CPU's gathering
// ones are slower than its single loads.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ballast::kernels {

// All arrays hold kMomentBlock elements.
// values[i] = the entry of codes[i].
template <bool kSigned>
void look_up_values(const std::uint8_t* codes, float* values);
// codes[i] = the entry nearest to magnitude[i], which falls into buckets[i]; negative where that has kNegativeMoment.
template <bool kSigned>
void look_up_codes(const float* magnitudes, const std::int32_t* buckets, std::uint8_t* codes);

constexpr std::int32_t kNegativeMoment = 1 << 16;

}  // namespace ballast::kernels
