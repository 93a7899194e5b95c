// The report of a run: one HTML file that needs nothing else, with a timeline that can be zoomed, bandwidth over time,
// memory against its budgets, bytes per parameter, and all figures.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/engine.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace ballast::cli {

struct RunReport {
  std::string title;               // "train gpt-10m.json"
  nlohmann::ordered_json figures;  // what --json holds; shown as a table, and `configuration` as one of its own
  Report engine;                   // at the end of the run: memory, by name
  Timeline timeline;
  std::vector<TimeWindow> steps;      // all of the run
  std::vector<TimeWindow> timed;      // those that the figures of speed are taken from
  std::uint64_t steady_begin_ns = 0;  // `bytes_per_step` counts from here on
  StepLimit limit;
};

// What the page shows, as its script reads it: README lists the keys.
nlohmann::ordered_json report_data(const RunReport& run);

// The page. Whatever a user may have named (a path, a unit) is text in it and nothing else.
std::string report_page(const RunReport& run);

// {"sentence", "lane", "share", ...}: the `limit` of --json.
nlohmann::ordered_json to_json(const StepLimit& limit);

}  // namespace ballast::cli
