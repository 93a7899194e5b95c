// Puts data, style and script into the page.
// SPDX-License-Identifier: Apache-2.0
#include "report/report.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

namespace ballast::cli {
namespace embedded {
// Of the files of these names, put in by the build.
extern const std::string_view page_html, page_css, page_js;
}  // namespace embedded

namespace {

using Json = nlohmann::ordered_json;

// A key of --json: "nvme_read".
std::string key_of(Lane lane) {
  std::string key(to_string(lane));
  std::replace(key.begin(), key.end(), ' ', '_');
  return key;
}

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      case '\'':
        result += "&#39;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

// JSON that can stand in a script element: nothing in it ends the element or opens a comment.
std::string script_json(const Json& json) {
  std::string result;
  for (const char c : json.dump(-1, ' ', true, Json::error_handler_t::replace)) {
    if (c == '<' || c == '>' || c == '&') {
      result += c == '<' ? "\\u003c" : c == '>' ? "\\u003e" : "\\u0026";
    } else {
      result += c;
    }
  }
  return result;
}

// Columns, in order of their beginning: a tenth of the bytes of one object per span.
Json spans_of(const RunReport& run, std::uint64_t origin_ns) {
  std::vector<const Span*> spans;
  for (const Span& span : run.timeline.spans) spans.push_back(&span);
  std::stable_sort(spans.begin(), spans.end(), [](const Span* a, const Span* b) { return a->begin_ns < b->begin_ns; });
  Json lane = Json::array(), begin = lane, duration = lane, bytes = lane, unit = lane, chunk = lane, what = lane,
       names = lane;
  std::map<std::string_view, std::size_t> numbers;
  for (const Span* span : spans) {
    const auto [found, is_new] = numbers.emplace(span->what, numbers.size());
    if (is_new) names.push_back(span->what);
    lane.push_back(static_cast<int>(span->lane));
    begin.push_back(span->begin_ns - origin_ns);
    duration.push_back(span->end_ns - span->begin_ns);
    bytes.push_back(span->bytes);
    unit.push_back(span->unit < run.timeline.unit_names.size() ? static_cast<std::int64_t>(span->unit) : -1);
    chunk.push_back(span->chunk);
    what.push_back(found->second);
  }
  return {{"lane", std::move(lane)},   {"begin_ns", std::move(begin)},  {"duration_ns", std::move(duration)},
          {"bytes", std::move(bytes)}, {"unit", std::move(unit)},       {"chunk", std::move(chunk)},
          {"what", std::move(what)},   {"what_names", std::move(names)}};
}

}  // namespace

nlohmann::ordered_json to_json(const StepLimit& limit) {
  Json out;
  out["sentence"] = to_sentence(limit);
  out["steps"] = limit.steps;
  out["lane"] = limit.steps > 0 ? Json(key_of(limit.lane)) : Json(nullptr);
  out["share"] = limit.steps > 0 ? Json(limit.share(limit.lane)) : Json(nullptr);
  out["step_seconds"] = limit.step_seconds;
  out["compute_seen"] = limit.compute_seen;
  out["compute_idle_seconds"] = limit.compute_idle_seconds;
  for (std::size_t i = 0; i < limit.busy_seconds.size(); ++i) {
    out["busy_seconds"][key_of(static_cast<Lane>(i))] = limit.busy_seconds[i];
    out["not_hidden_seconds"][key_of(static_cast<Lane>(i))] = limit.not_hidden_seconds[i];
  }
  return out;
}

nlohmann::ordered_json report_data(const RunReport& run) {
  std::uint64_t origin = UINT64_MAX;
  for (const Span& span : run.timeline.spans) origin = std::min(origin, span.begin_ns);
  for (const TimeWindow& step : run.steps) origin = std::min(origin, step.begin_ns);
  if (origin == UINT64_MAX) origin = 0;
  const auto windows = [&](const std::vector<TimeWindow>& all) {
    Json list = Json::array();
    for (const TimeWindow& step : all) list.push_back({step.begin_ns - origin, step.end_ns - origin});
    return list;
  };
  const auto memory = [](const std::vector<MemoryRange>& ranges) {
    Json list = Json::array();
    for (const MemoryRange& range : ranges) list.push_back({{"name", range.name}, {"bytes", range.bytes}});
    return list;
  };
  Json out;
  out["title"] = run.title;
  out["limit"] = to_json(run.limit);
  Json lanes = Json::array();
  for (int lane = 0; lane < kLaneCount; ++lane) lanes.push_back(to_string(static_cast<Lane>(lane)));
  out["lanes"] = std::move(lanes);
  out["units"] = run.timeline.unit_names;
  out["steps"] = windows(run.steps);
  out["timed_steps"] = windows(run.timed);
  out["steady_begin_ns"] = run.steady_begin_ns > origin ? run.steady_begin_ns - origin : 0;
  out["complete_from_ns"] = run.timeline.complete_from_ns > origin ? run.timeline.complete_from_ns - origin : 0;
  out["memory"] = {{"device",
                    {{"budget", run.engine.budget_device_bytes},
                     {"peak", run.engine.peak_device_bytes},
                     {"parts", memory(run.engine.device_memory)}}},
                   {"host",
                    {{"budget", run.engine.budget_host_bytes},
                     {"peak", run.engine.peak_host_bytes},
                     {"parts", memory(run.engine.host_memory)}}},
                   {"nvme", {{"stored", run.engine.nvme_stored_bytes}}}};
  out["figures"] = run.figures;
  out["spans"] = spans_of(run, origin);
  return out;
}

std::string report_page(const RunReport& run) {
  const std::pair<std::string_view, std::string> parts[] = {{"{{title}}", escaped(run.title)},
                                                            {"{{sentence}}", escaped(to_sentence(run.limit))},
                                                            {"{{style}}", std::string(embedded::page_css)},
                                                            {"{{script}}", std::string(embedded::page_js)},
                                                            {"{{data}}", script_json(report_data(run))}};
  // One pass over the page: what is put in is not looked at again.
  std::string result;
  for (std::string_view rest = embedded::page_html;;) {
    const std::size_t at = rest.find("{{");
    result += rest.substr(0, at);
    if (at == std::string_view::npos) return result;
    rest.remove_prefix(at);
    const auto part = std::find_if(std::begin(parts), std::end(parts),
                                   [&](const auto& each) { return rest.starts_with(each.first); });
    result += part == std::end(parts) ? std::string(rest.substr(0, 2)) : part->second;
    rest.remove_prefix(part == std::end(parts) ? 2 : part->first.size());
  }
}

}  // namespace ballast::cli
