// A timeline as trace-event JSON.
// SPDX-License-Identifier: Apache-2.0
#include "span_log.h"

#include <ballast/base/error.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

namespace ballast::engine {

// The tasks of a lane overlap, and slices of one thread may not: each lane is as many threads as it had tasks under way
// at once.
void write_trace_file(const std::string& path, const Timeline& timeline) {
  constexpr int kRowsMax = 1000;
  nlohmann::json events = nlohmann::json::array();
  events.push_back({{"ph", "M"}, {"pid", 1}, {"name", "process_name"}, {"args", {{"name", "ballast"}}}});
  std::vector<const Span*> spans;
  for (const Span& span : timeline.spans) spans.push_back(&span);
  std::stable_sort(spans.begin(), spans.end(), [](const Span* a, const Span* b) { return a->begin_ns < b->begin_ns; });
  const std::uint64_t origin = spans.empty() ? 0 : spans.front()->begin_ns;
  const auto microseconds = [](std::uint64_t ns) { return static_cast<double>(ns) / 1000.0; };
  std::array<std::vector<std::uint64_t>, kLaneCount> row_ends;
  for (const Span* span : spans) {
    std::vector<std::uint64_t>& ends = row_ends[static_cast<std::size_t>(span->lane)];
    auto row = std::find_if(ends.begin(), ends.end(), [&](std::uint64_t end) { return end <= span->begin_ns; });
    if (row == ends.end()) row = ends.insert(ends.end(), 0);
    *row = span->end_ns;
    const std::string unit = span->unit < timeline.unit_names.size() ? timeline.unit_names[span->unit] : "";
    events.push_back({{"ph", "X"},
                      {"pid", 1},
                      {"tid", kRowsMax * (static_cast<int>(span->lane) + 1) + (row - ends.begin())},
                      {"cat", std::string(to_string(span->lane))},
                      {"name", std::string(span->what) + (unit.empty() ? "" : " " + unit)},
                      {"ts", microseconds(span->begin_ns - origin)},
                      {"dur", microseconds(span->end_ns - span->begin_ns)},
                      {"args", {{"unit", unit}, {"chunk", span->chunk}, {"bytes", span->bytes}}}});
  }
  for (int lane = 0; lane < kLaneCount; ++lane) {
    const std::size_t rows = std::max<std::size_t>(1, row_ends[static_cast<std::size_t>(lane)].size());
    for (std::size_t row = 0; row < rows; ++row) {
      const std::string name =
          std::string(to_string(static_cast<Lane>(lane))) + (row == 0 ? std::string() : " " + std::to_string(row + 1));
      const auto thread = kRowsMax * (lane + 1) + static_cast<int>(row);
      events.push_back({{"ph", "M"}, {"pid", 1}, {"tid", thread}, {"name", "thread_name"}, {"args", {{"name", name}}}});
      events.push_back({{"ph", "M"},
                        {"pid", 1},
                        {"tid", thread},
                        {"name", "thread_sort_index"},
                        {"args", {{"sort_index", thread}}}});
    }
  }
  std::ofstream file(path, std::ios::trunc);
  file << nlohmann::json{{"traceEvents", std::move(events)}, {"displayTimeUnit", "ms"}}.dump(
              -1, ' ', false, nlohmann::json::error_handler_t::replace)
       << '\n';
  file.close();
  if (!file) throw IoError("cannot write the trace to " + path + ": " + std::strerror(errno));
}

}  // namespace ballast::engine
