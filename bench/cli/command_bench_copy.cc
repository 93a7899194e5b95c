// ballast bench copy: copies between host and device, each way and both at once, against a plain copy in memory.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/base/size.h>
#include <ballast/offload/device_registry.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "bench_copy.h"
#include "command.h"
#include "display.h"
#include "output_file.h"

namespace ballast::cli {
namespace {

struct Options {
  EngineOptions engine;
  std::string size = "256MiB";
  int iterations = 9;
  std::string json;
};

int run(const Options& options) {
  const Config config = options.engine.load();
  const std::uint64_t bytes = base::round_up(size_option("--size", options.size), 4096);
  OutputFile json_file(options.json);
  const std::string kind = config.device == "auto" ? offload::automatic_device() : config.device;
  const CopyBenchResult result = run_copy_bench(kind, bytes, options.iterations);
  print_table({{"host to device", rate_text(result.to_device)},
               {"device to host", rate_text(result.to_host)},
               {"both at once, together", rate_text(result.both)},
               {"host to device, memory not registered", rate_text(result.unpinned)},
               {"a copy in host memory", rate_text(result.in_memory)},
               {"device, size", kind + ", " + base::format_size(bytes)}});
  if (json_file.wanted()) {
    nlohmann::ordered_json figures;
    figures["host_to_device_bytes_per_second"] = result.to_device;
    figures["device_to_host_bytes_per_second"] = result.to_host;
    figures["duplex_bytes_per_second"] = result.both;
    figures["pageable_host_to_device_bytes_per_second"] = result.unpinned;
    figures["memory_copy_bytes_per_second"] = result.in_memory;
    figures["device"] = kind;
    figures["size"] = bytes;
    json_file.publish(figures.dump(2) + "\n");
  }
  return 0;
}

}  // namespace

Command add_bench_copy(CLI::App& bench) {
  auto options = std::make_shared<Options>();
  CLI::App* parser = bench.add_subcommand("copy", "Copies between host and device memory");
  options->engine.add_to(*parser, false);
  parser->add_option("--size", options->size, "Bytes per copy")->capture_default_str();
  parser->add_option("--iterations", options->iterations, "Copies of which the median counts")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  parser->add_option("--json", options->json, "Write the figures to FILE")->type_name("FILE");
  return {parser, [options] { return run(*options); }};
}

}  // namespace ballast::cli
