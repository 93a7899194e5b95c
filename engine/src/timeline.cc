// What limited a step, from its spans: sums over unions of intervals.
// SPDX-License-Identifier: Apache-2.0
#include "ballast/engine/timeline.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

namespace ballast {
namespace {

using Interval = std::pair<std::uint64_t, std::uint64_t>;

// Sorts, and joins what touches or overlaps.
std::vector<Interval> joined(std::vector<Interval> intervals) {
  std::sort(intervals.begin(), intervals.end());
  std::vector<Interval> result;
  for (const Interval& each : intervals) {
    if (each.first >= each.second) continue;
    if (result.empty() || result.back().second < each.first) {
      result.push_back(each);
    } else {
      result.back().second = std::max(result.back().second, each.second);
    }
  }
  return result;
}

// What two joined lists have in common; joined as well.
std::vector<Interval> common(const std::vector<Interval>& a, const std::vector<Interval>& b) {
  std::vector<Interval> result;
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const std::uint64_t begin = std::max(a[i].first, b[j].first), end = std::min(a[i].second, b[j].second);
    if (begin < end) result.emplace_back(begin, end);
    ++(a[i].second < b[j].second ? i : j);
  }
  return result;
}

double seconds(const std::vector<Interval>& intervals) {
  std::uint64_t sum = 0;
  for (const Interval& each : intervals) sum += each.second - each.first;
  return static_cast<double>(sum) * 1e-9;
}

constexpr std::size_t index(Lane lane) { return static_cast<std::size_t>(lane); }

std::string seconds_text(double value) {
  char text[32];
  const bool small = value < 0.0995;  // what would round to less than 0.10 s
  std::snprintf(text, sizeof text, small ? "%.1f ms" : "%.2f s", small ? value * 1e3 : value);
  return text;
}

const char* subject(Lane lane) {
  static constexpr const char* kSubjects[kLaneCount] = {
      "NVMe reads",  "NVMe writes", "copies from host to device", "copies from device to host",
      "collectives", "compute",     "updates on the CPU"};
  return kSubjects[index(lane)];
}

}  // namespace

std::string_view to_string(Lane lane) {
  static constexpr std::string_view kNames[kLaneCount] = {
      "nvme read", "nvme write", "host to device", "device to host", "collective", "compute", "cpu"};
  return kNames[index(lane)];
}

double StepLimit::share(Lane of) const { return step_seconds > 0 ? busy_seconds[index(of)] / step_seconds : 0; }

StepLimit limit_of(const Timeline& timeline, std::span<const TimeWindow> steps) {
  StepLimit limit;
  std::vector<Interval> windows;
  for (const TimeWindow& step : steps) {
    if (step.begin_ns < timeline.complete_from_ns || step.begin_ns >= step.end_ns) continue;
    windows.emplace_back(step.begin_ns, step.end_ns);
  }
  limit.steps = windows.size();
  if (windows.empty()) return limit;
  windows = joined(std::move(windows));
  std::array<std::vector<Interval>, kLaneCount> busy;
  for (const Span& span : timeline.spans) busy[index(span.lane)].emplace_back(span.begin_ns, span.end_ns);
  for (std::vector<Interval>& lane : busy) lane = common(joined(std::move(lane)), windows);
  const std::vector<Interval>& compute = busy[index(Lane::compute)];
  const auto of_a_step = [&](double sum) { return sum / static_cast<double>(limit.steps); };
  limit.step_seconds = of_a_step(seconds(windows));
  limit.compute_seen = !compute.empty();
  for (std::size_t i = 0; i < busy.size(); ++i) {
    limit.busy_seconds[i] = of_a_step(seconds(busy[i]));
    limit.not_hidden_seconds[i] = of_a_step(seconds(busy[i]) - seconds(common(busy[i], compute)));
  }
  for (std::size_t i = 0; i < busy.size(); ++i) {
    if (limit.busy_seconds[i] > limit.busy_seconds[index(limit.lane)]) limit.lane = static_cast<Lane>(i);
  }
  limit.compute_idle_seconds = std::max(0.0, limit.step_seconds - limit.busy_seconds[index(Lane::compute)]);
  return limit;
}

std::string to_sentence(const StepLimit& limit) {
  if (limit.steps == 0) return "What limits a step cannot be told: none was measured whole";
  if (limit.busy_seconds[index(limit.lane)] <= 0) return "Nothing limits a step: no lane had work in those measured";
  char share[48];
  std::snprintf(share, sizeof share, " %.0f %% of a step (", limit.share(limit.lane) * 100);
  std::string text = subject(limit.lane) + (share + seconds_text(limit.step_seconds)) + ")";
  if (text[0] >= 'a') text[0] = static_cast<char>(text[0] - 'a' + 'A');
  if (!limit.compute_seen) return text + "; what of it is hidden cannot be told, as the device's compute is not seen";
  const double negligible = 0.005 * limit.step_seconds;
  if (limit.lane != Lane::compute) {
    const double open = limit.not_hidden_seconds[index(limit.lane)];
    return text + (open <= negligible ? ", all of it hidden behind compute"
                                      : ", of which " + seconds_text(open) + " not hidden");
  }
  if (limit.compute_idle_seconds <= negligible) return text + ", which never waited";
  text += ", which stood still for " + seconds_text(limit.compute_idle_seconds);
  const auto most = std::max_element(limit.not_hidden_seconds.begin(), limit.not_hidden_seconds.end());
  if (*most <= negligible) return text;
  const auto behind = static_cast<Lane>(most - limit.not_hidden_seconds.begin());
  return text + ", " + seconds_text(*most) + " of it beside " + subject(behind);
}

}  // namespace ballast
