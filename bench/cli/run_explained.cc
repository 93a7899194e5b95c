// Between the record of a run and what is written about it.
// SPDX-License-Identifier: Apache-2.0
#include "run_explained.h"

#include <cstdio>

namespace ballast::cli {

void explain(const Engine& engine, const RunRecord& record, RunReport* run) {
  run->engine = record.end;
  run->timeline = engine.timeline();
  run->steps = record.windows(false);
  run->timed = record.windows(true);
  run->steady_begin_ns = record.steady_begin_ns;
  run->limit = limit_of(run->timeline, run->timed);
}

void print_limit(const RunReport& run) { std::printf("%s.\n", to_sentence(run.limit).c_str()); }

void publish(const RunReport& run, OutputFile& json_file, OutputFile& report_file) {
  if (report_file.wanted()) report_file.publish(report_page(run));
  if (json_file.wanted())
    json_file.publish(run.figures.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

}  // namespace ballast::cli
