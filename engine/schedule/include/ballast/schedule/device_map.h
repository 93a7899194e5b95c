// The static map of the device slab: where each opening of a pass (a unit's parameters, a unit's gradient scratch)
// lies. Compiled once per trace; pure arithmetic. Openings whose lives overlap in the trace get disjoint ranges; beyond
// that, places are chosen so that what nobody needs any more in the pass is overwritten first, then what was closed
// longest ago: it leaves the most room to fetch ahead, and keeps the last units of forward for the first ones of
// backward. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace ballast::schedule {

// One use of device memory. Times are positions in the trace's events, each used once; close > open.
struct Opening {
  std::uint32_t unit = 0;
  bool gradient = false;
  std::uint64_t bytes = 0;  // a multiple of the alignment; 0 takes no place
  std::uint32_t open_at = 0;
  std::uint32_t close_at = 0;
};

struct DeviceMap {
  bool fits = false;
  std::vector<std::uint64_t> offsets;  // one per opening, where it fits
  std::uint64_t used_bytes = 0;        // highest end
  std::uint64_t smallest_bytes = 0;    // a slab of this size fits (and none of this plan's form fits less)
};

// Openings in the order of open_at.
DeviceMap compile_device_map(std::span<const Opening> openings, std::uint64_t slab_bytes);

}  // namespace ballast::schedule
