// A timeline as trace-event JSON.
// SPDX-License-Identifier: Apache-2.0
#include "span_log.h"

#include <ballast/base/error.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

namespace ballast::engine {

void write_trace_file(const std::string& path, const SpanLog& spans, const std::vector<std::string>& unit_names) {
  static constexpr const char* kLanes[kLaneCount] = {
      "nvme read", "nvme write", "host to device", "device to host", "collective", "compute", "cpu"};
  nlohmann::json events = nlohmann::json::array();
  for (int lane = 0; lane < kLaneCount; ++lane) {
    events.push_back(
        {{"ph", "M"}, {"pid", 1}, {"tid", lane + 1}, {"name", "thread_name"}, {"args", {{"name", kLanes[lane]}}}});
  }
  std::uint64_t origin = UINT64_MAX;
  spans.visit([&](const Span& span) { origin = std::min(origin, span.begin_ns); });
  // Spans of one lane overlap; each is an asynchronous pair of its own.
  std::uint64_t id = 0;
  spans.visit([&](const Span& span) {
    const std::string unit = span.unit < unit_names.size() ? unit_names[span.unit] : "";
    const nlohmann::json common = {{"cat", kLanes[static_cast<int>(span.lane)]},
                                   {"name", std::string(span.what) + " " + unit},
                                   {"id", id++},
                                   {"pid", 1},
                                   {"tid", static_cast<int>(span.lane) + 1}};
    nlohmann::json begin = common;
    begin["ph"] = "b";
    begin["ts"] = static_cast<double>(span.begin_ns - origin) / 1000.0;
    begin["args"] = {{"unit", unit}, {"chunk", span.chunk}, {"bytes", span.bytes}};
    nlohmann::json end = common;
    end["ph"] = "e";
    end["ts"] = static_cast<double>(span.end_ns - origin) / 1000.0;
    events.push_back(std::move(begin));
    events.push_back(std::move(end));
  });
  std::ofstream file(path, std::ios::trunc);
  file << nlohmann::json{{"traceEvents", std::move(events)}, {"displayTimeUnit", "ms"}}.dump(
              -1, ' ', false, nlohmann::json::error_handler_t::replace)
       << '\n';
  file.close();
  if (!file) throw IoError("cannot write the trace to " + path + ": " + std::strerror(errno));
}

}  // namespace ballast::engine
