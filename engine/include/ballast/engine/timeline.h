// Timeline: what ran when in the last steps, and what that says about their speed.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/report.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ballast {

// "nvme read", "host to device", ...
std::string_view to_string(Lane lane);

// One task of a lane. Tasks of one lane overlap. Times are those of std::chrono::steady_clock.
struct Span {
  Lane lane = Lane::compute;
  const char* what = "";              // "read", "update", ...; a literal
  std::uint32_t unit = 0, chunk = 0;  // kNoUnit: of none in particular
  std::uint64_t begin_ns = 0, end_ns = 0;
  std::uint64_t bytes = 0;  // as LaneReport counts them
};
constexpr std::uint32_t kNoUnit = 0xFFFFFFFFu;

struct Timeline {
  std::vector<Span> spans;              // in no order
  std::vector<std::string> unit_names;  // by Span::unit
  // The engine keeps the last tens of thousands of spans: none that ended after this is missing.
  std::uint64_t complete_from_ns = 0;
};

struct TimeWindow {
  std::uint64_t begin_ns = 0, end_ns = 0;
};

// Where the time of a step went, from the spans in the windows of the steps. All seconds are of a mean step.
struct StepLimit {
  std::size_t steps = 0;  // those of which every span is there; 0: nothing can be told
  double step_seconds = 0;
  bool compute_seen = false;  // false: the device computes out of the engine's sight (a GPU's own kernels)
  Lane lane = Lane::compute;  // that had work for most of the step; of equal ones compute, else the first
  std::array<double, kLaneCount> busy_seconds{};        // at least one task under way
  std::array<double, kLaneCount> not_hidden_seconds{};  // of these, the compute lane had nothing to do
  double compute_idle_seconds = 0;

  double share(Lane of) const;  // busy over step
};

// Spans may be in any order and overlap; they are cut to the windows. Windows do not overlap. Those that begin before
// timeline.complete_from_ns are left out.
StepLimit limit_of(const Timeline& timeline, std::span<const TimeWindow> steps);

// "NVMe writes 71 % of a step (2.68 s), of which 1.90 s not hidden", one sentence without a full stop.
std::string to_sentence(const StepLimit& limit);

}  // namespace ballast
