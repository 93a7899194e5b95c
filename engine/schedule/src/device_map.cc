// Placing openings in the device slab.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/schedule/device_map.h>

#include <algorithm>

namespace ballast::schedule {

namespace {

constexpr std::uint32_t kNoUnit = 0xFFFFFFFFu;

// A stretch of the slab, closed since `closed_at` (0: never used); with the parameters of `unit`, whole and unchanged.
struct Stretch {
  std::uint64_t begin = 0, end = 0;
  std::uint32_t closed_at = 0;
  std::uint32_t unit = kNoUnit;
  bool needed = false;  // by a later opening of the pass
};

// A stretch that was closed within the last openings makes what is fetched into it wait for them.
constexpr std::size_t kRecentOpenings = 2;

// Every place is chosen to overwrite first what nobody needs any more in this pass (unless it was closed just now), and
// then what was closed longest ago.
bool place_oldest_first(std::span<const Opening> openings, std::uint64_t slab_bytes,
                        std::vector<std::uint64_t>& offsets) {
  std::vector<Stretch> stretches = {{0, slab_bytes, 0, kNoUnit}};  // by place; what was never used is the last
  std::uint32_t units = 0;
  for (const Opening& opening : openings) units = std::max(units, opening.unit + 1);
  std::vector<std::uint8_t> needed(openings.size(), 0);
  {
    std::vector<std::uint8_t> again(units, 0);
    for (std::size_t i = openings.size(); i-- > 0;) {
      if (openings[i].gradient) continue;
      needed[i] = again[openings[i].unit];
      again[openings[i].unit] = 1;
    }
  }
  std::vector<std::uint64_t> last_place(units, 0);  // of each unit's parameters
  for (std::size_t i = 0; i < openings.size(); ++i) {
    const Opening& opening = openings[i];
    if (opening.bytes == 0) continue;
    if (opening.bytes > slab_bytes) return false;
    const std::uint32_t now = opening.open_at + 1;  // 0 is "never"
    // The unit's own parameters, still whole from an earlier opening of this pass.
    if (!opening.gradient) {
      const auto own = std::lower_bound(stretches.begin(), stretches.end(), last_place[opening.unit],
                                        [](const Stretch& s, std::uint64_t place) { return s.begin < place; });
      if (own != stretches.end() && own->begin == last_place[opening.unit] && own->unit == opening.unit &&
          own->end - own->begin == opening.bytes && own->closed_at <= now) {
        own->closed_at = opening.close_at + 1;
        own->needed = needed[i] != 0;
        offsets[i] = own->begin;
        continue;
      }
    }
    const std::uint32_t recent = i < kRecentOpenings ? 0 : openings[i - kRecentOpenings].open_at + 1;
    const auto cost_of = [&](const Stretch& s) {
      const bool last_choice = s.closed_at != 0 && (s.needed || s.closed_at > recent);
      return std::uint64_t{last_choice} << 32 | s.closed_at;
    };
    std::size_t best = stretches.size();
    std::uint64_t best_cost = ~std::uint64_t{0};
    const Stretch& rear = stretches.back();
    if (rear.closed_at == 0 && rear.end - rear.begin >= opening.bytes) {
      best_cost = 0;
      best = stretches.size() - 1;
    }
    for (std::size_t first = 0; first < stretches.size() && best_cost != 0; ++first) {
      const std::uint64_t end = stretches[first].begin + opening.bytes;
      if (end > slab_bytes) break;
      std::uint64_t cost = 0;
      for (std::size_t k = first; k < stretches.size() && stretches[k].begin < end && cost < best_cost; ++k) {
        cost = stretches[k].closed_at > now ? best_cost : std::max(cost, cost_of(stretches[k]));
      }
      if (cost < best_cost) {
        best_cost = cost;
        best = first;
      }
    }
    if (best == stretches.size()) return false;
    const std::uint64_t begin = stretches[best].begin;
    const std::uint64_t end = begin + opening.bytes;
    std::size_t last = best;
    while (stretches[last].end < end) ++last;
    Stretch rest = stretches[last];
    rest.begin = end;
    rest.unit = kNoUnit;
    rest.needed = false;
    stretches.erase(stretches.begin() + static_cast<std::ptrdiff_t>(best),
                    stretches.begin() + static_cast<std::ptrdiff_t>(last) + 1);
    auto at = stretches.begin() + static_cast<std::ptrdiff_t>(best);
    if (rest.begin < rest.end) at = stretches.insert(at, rest);
    stretches.insert(at, {begin, end, opening.close_at + 1, opening.gradient ? kNoUnit : opening.unit, needed[i] != 0});
    offsets[i] = begin;
    if (!opening.gradient) last_place[opening.unit] = begin;
  }
  return true;
}

// Parameters from the bottom, gradients from the top, each at the first gap: the form that needs the least memory.
// Returns what it needs; fills offsets of gradients as distances from the top.
std::uint64_t place_tightly(std::span<const Opening> openings, std::vector<std::uint64_t>& offsets) {
  struct Live {
    std::uint64_t begin, end;
    std::uint32_t close_at;
  };
  std::vector<Live> live[2];
  std::uint64_t needed = 0;
  for (std::size_t i = 0; i < openings.size(); ++i) {
    const Opening& opening = openings[i];
    if (opening.bytes == 0) continue;
    for (auto& side : live) {
      std::erase_if(side, [&](const Live& l) { return l.close_at <= opening.open_at; });
    }
    auto& side = live[opening.gradient ? 1 : 0];
    std::uint64_t begin = 0;
    std::size_t at = 0;
    for (; at < side.size() && side[at].begin < begin + opening.bytes; ++at) begin = side[at].end;
    side.insert(side.begin() + static_cast<std::ptrdiff_t>(at), {begin, begin + opening.bytes, opening.close_at});
    offsets[i] = begin;
    const std::uint64_t low = live[0].empty() ? 0 : live[0].back().end;
    const std::uint64_t high = live[1].empty() ? 0 : live[1].back().end;
    needed = std::max(needed, low + high);
  }
  return needed;
}

}  // namespace

DeviceMap compile_device_map(std::span<const Opening> openings, std::uint64_t slab_bytes) {
  DeviceMap map;
  std::vector<std::uint64_t> tight(openings.size(), 0);
  map.smallest_bytes = place_tightly(openings, tight);
  map.offsets.assign(openings.size(), 0);
  map.fits = map.smallest_bytes <= slab_bytes;
  if (!map.fits) return map;
  if (!place_oldest_first(openings, slab_bytes, map.offsets)) {
    for (std::size_t i = 0; i < openings.size(); ++i) {
      map.offsets[i] =
          openings[i].gradient && openings[i].bytes > 0 ? slab_bytes - tight[i] - openings[i].bytes : tight[i];
    }
  }
  for (std::size_t i = 0; i < openings.size(); ++i) {
    if (openings[i].bytes > 0) map.used_bytes = std::max(map.used_bytes, map.offsets[i] + openings[i].bytes);
  }
  return map;
}

}  // namespace ballast::schedule
