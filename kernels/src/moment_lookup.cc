// Tables of 8-bit moments, read one element at a time.
// SPDX-License-Identifier: Apache-2.0
#include "moment_lookup.h"

#include <algorithm>
#include <cstddef>

#include "ballast/kernels/moments.h"
#include "cpu/moment_map.h"

namespace ballast::kernels {

template <bool kSigned>
void look_up_values(const std::uint8_t* codes, float* values) {
  for (std::size_t i = 0; i < kMomentBlock; ++i) values[i] = kMomentMap<kSigned>.value[codes[i]];
}

template <bool kSigned>
void look_up_codes(const float* magnitudes, const std::int32_t* buckets, std::uint8_t* codes) {
  constexpr const MomentMap<kSigned>& map = kMomentMap<kSigned>;
  for (std::size_t i = 0; i < kMomentBlock; ++i) {
    if constexpr (kSigned) {
      unsigned entry = map.nearest[static_cast<std::size_t>(buckets[i] & (kNegativeMoment - 1))];
      entry += magnitudes[i] > map.border[entry];
      const unsigned negative = static_cast<unsigned>(buckets[i]) / kNegativeMoment;
      entry = std::min(entry, 128 - negative);
      codes[i] = static_cast<std::uint8_t>((entry ^ (0U - negative)) + negative);
    } else {
      unsigned entry = map.nearest[static_cast<std::size_t>(buckets[i])];
      entry += magnitudes[i] > map.border[entry];
      codes[i] = static_cast<std::uint8_t>(entry);
    }
  }
}

template void look_up_values<true>(const std::uint8_t*, float*);
template void look_up_values<false>(const std::uint8_t*, float*);
template void look_up_codes<true>(const float*, const std::int32_t*, std::uint8_t*);
template void look_up_codes<false>(const float*, const std::int32_t*, std::uint8_t*);

}  // namespace ballast::kernels
