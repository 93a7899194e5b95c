// ballast doctor: what works on this machine, and how to mend what does not.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "accelerators.h"
#include "command.h"
#include "doctor.h"
#include "gpu.h"
#include "output_file.h"
#include "ranks.h"

namespace ballast::cli {
namespace {

struct Options {
  EngineOptions engine;
  std::string json;
};

const char* state_text(const DoctorLine& line) {
  switch (line.state) {
    case DoctorLine::good:
      return "good";
    case DoctorLine::warning:
      return "warning";
    case DoctorLine::bad:
      return "bad";
  }
  return "bad";
}

int run(const Options& options) {
  const Config config = options.engine.load();
  OutputFile json_file(options.json);
  AcceleratorFacts accelerators = machine_facts();
  accelerators.mpi_built = communicator_factories().mpi != nullptr;
  add_gpu_facts(accelerators);
  const std::vector<DoctorLine> lines = examine(config.nvme.paths, accelerators);
  std::size_t width = 0;
  for (const DoctorLine& line : lines) width = std::max(width, line.what.size());
  nlohmann::ordered_json out = nlohmann::ordered_json::array();
  for (const DoctorLine& line : lines) {
    std::printf("%-7s  %-*s  %s\n", state_text(line), static_cast<int>(width), line.what.c_str(), line.finding.c_str());
    if (!line.cure.empty()) std::printf("%-7s  %-*s  -> %s\n", "", static_cast<int>(width), "", line.cure.c_str());
    out.push_back({{"what", line.what}, {"state", state_text(line)}, {"finding", line.finding}, {"cure", line.cure}});
  }
  json_file.publish(
      nlohmann::ordered_json{{"lines", out}}.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  return 0;
}

}  // namespace

Command add_doctor(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* parser =
      app.add_subcommand("doctor", "Examine this machine: rings, limits, direct I/O, memory, CPUs, GPUs");
  options->engine.add_to(*parser, false);
  options->engine.add_explain(*parser);
  parser->add_option("--json", options->json, "Write the findings to FILE")->type_name("FILE");
  return {parser, [options] { return run(*options); }};
}

}  // namespace ballast::cli
