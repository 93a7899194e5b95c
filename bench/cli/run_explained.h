// A run's ending: the sentence on what limited it, and its files for machines and for people.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "output_file.h"
#include "report/report.h"
#include "run_record.h"

namespace ballast::cli {

// Takes the engine's timeline and says what limited the timed steps; all but `title` and `figures` of the run.
void explain(const Engine& engine, const RunRecord& record, RunReport* run);

void print_limit(const RunReport& run);

// Writes run.figures to the one and the page to the other, where they are wanted. Throws IoError.
void publish(const RunReport& run, OutputFile& json_file, OutputFile& report_file);

}  // namespace ballast::cli
