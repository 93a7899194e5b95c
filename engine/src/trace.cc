// Recording and compiling passes.
// SPDX-License-Identifier: Apache-2.0
#include "trace.h"

#include <algorithm>

namespace ballast::engine {

namespace {
constexpr std::uint32_t kOpen = 0xFFFFFFFFu;
}

bool compile_trace(const Plan& plan, std::uint64_t gradient_element_bytes, Trace& trace) {
  const std::size_t count = trace.openings.size();
  const std::vector<schedule::Opening> openings = device_openings(plan, trace.openings, gradient_element_bytes);
  schedule::DeviceMap map = schedule::compile_device_map(openings, plan.device_window_bytes);
  if (!map.fits) return false;
  trace.offsets = std::move(map.offsets);
  trace.first_parameters.assign(count, 0);
  trace.carries_update.assign(count, 0);
  trace.queues_update.assign(count, 0);
  trace.forward_end = count;
  const std::size_t units = plan.layout.units.size();
  std::vector<std::uint8_t> seen(units, 0);
  std::vector<std::size_t> commits(units, 0);
  std::vector<std::size_t> last_parameters(units, count);  // the acquire that the unit's gradient belongs to
  for (std::size_t i = 0; i < count; ++i) {
    const TraceOpening& opening = trace.openings[i];
    if (opening.gradient) {
      ++commits[opening.unit];
      trace.forward_end = std::min(trace.forward_end, i);
    } else if (!seen[opening.unit]) {
      seen[opening.unit] = 1;
      trace.first_parameters[i] = 1;
    }
  }
  if (plan.timing != Timing::eager) return true;

  // A unit's update slots are held from its acquire (or, where the update is queued with it, from its gradient's
  // opening) until its gradient has come. Parameters that bring their update must find slots beside what is held: a
  // stream may wait for them before it comes to those gradients.
  struct Held {
    std::uint32_t until;
    std::uint64_t chunks;
  };
  std::vector<Held> held;
  std::vector<std::size_t> gradient_of(count, count);
  for (std::size_t i = 0; i < count; ++i) {
    const TraceOpening& opening = trace.openings[i];
    if (!opening.gradient) {
      last_parameters[opening.unit] = i;
      continue;
    }
    if (opening.last) trace.queues_update[i] = 1;
    if (opening.last && commits[opening.unit] == 1 && last_parameters[opening.unit] < count) {
      gradient_of[last_parameters[opening.unit]] = i;
    }
  }
  for (std::size_t i = 0; i < count; ++i) {
    const TraceOpening& opening = trace.openings[i];
    std::erase_if(held, [&](const Held& h) { return h.until <= opening.open_at; });
    if (opening.gradient) {
      if (trace.queues_update[i]) held.push_back({opening.close_at, plan.layout.units[opening.unit].chunk_count});
      continue;
    }
    if (gradient_of[i] == count) continue;
    std::uint64_t chunks = plan.layout.units[opening.unit].chunk_count;
    for (const Held& h : held) chunks += h.chunks;
    if (chunks > plan.update_slots) continue;
    held.push_back({trace.openings[gradient_of[i]].close_at, plan.layout.units[opening.unit].chunk_count});
    trace.carries_update[i] = 1;
    trace.queues_update[gradient_of[i]] = 0;
    trace.forward_end = std::min(trace.forward_end, i);
  }
  return true;
}

std::vector<TraceOpening> default_openings(const std::vector<bool>& unit_trainable) {
  std::vector<TraceOpening> openings;
  std::uint32_t event = 0;
  for (std::uint32_t u = 0; u < unit_trainable.size(); ++u) {
    openings.push_back({u, false, false, event, event + 1});
    event += 2;
  }
  for (auto u = static_cast<std::uint32_t>(unit_trainable.size()); u-- > 0;) {
    if (!unit_trainable[u]) {
      openings.push_back({u, false, false, event, event + 1});
      event += 2;
      continue;
    }
    openings.push_back({u, false, false, event, event + 3});
    openings.push_back({u, true, true, event + 1, event + 2});
    event += 4;
  }
  return openings;
}

void TraceRecorder::begin() {
  openings_.clear();
  events_ = 0;
}

std::uint32_t TraceRecorder::open(std::uint32_t unit, bool gradient) {
  openings_.push_back({unit, gradient, false, events_++, kOpen});
  return static_cast<std::uint32_t>(openings_.size() - 1);
}

void TraceRecorder::close(std::uint32_t opening, bool last) {
  if (opening >= openings_.size() || openings_[opening].close_at != kOpen) return;
  openings_[opening].close_at = events_++;
  openings_[opening].last = last;
}

const std::vector<TraceOpening>& TraceRecorder::end() {
  for (TraceOpening& opening : openings_) {
    if (opening.close_at == kOpen) opening.close_at = events_++;
  }
  return openings_;
}

bool same_openings(const std::vector<TraceOpening>& a, const std::vector<TraceOpening>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const TraceOpening& x, const TraceOpening& y) {
    return x.unit == y.unit && x.gradient == y.gradient && x.last == y.last && x.open_at == y.open_at &&
           x.close_at == y.close_at;
  });
}

}  // namespace ballast::engine
