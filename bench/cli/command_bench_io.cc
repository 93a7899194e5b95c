// ballast bench io: what the paths read, write, and do both at once, in this process's own way of asking.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/base/size.h>

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "command.h"
#include "display.h"
#include "output_file.h"
#include "storage_bench.h"

namespace ballast::cli {
namespace {

struct Options {
  EngineOptions engine;
  std::vector<std::string> paths;
  std::string size = "2GiB";
  std::string block_size;
  int queue_depth = 0;
  std::string backend;
  std::string json;
};

Config effective(const Options& options) {
  Config config = options.engine.load();
  if (!options.paths.empty()) config.nvme.paths = options.paths;
  if (!options.block_size.empty()) config.nvme.block_bytes = size_option("--block-size", options.block_size);
  if (options.queue_depth != 0) config.nvme.queue_depth = static_cast<std::uint32_t>(options.queue_depth);
  if (!options.backend.empty()) config.nvme.backend = options.backend;
  config.validate();
  return config;
}

int run(const Options& options) {
  const Config config = effective(options);
  const std::uint64_t asked = size_option("--size", options.size);
  const std::uint64_t per_path = base::round_down(asked / config.nvme.paths.size(), config.nvme.block_bytes);
  if (per_path == 0)
    throw ConfigError("--size " + options.size + " is less than one block of " +
                      base::format_size(config.nvme.block_bytes) + " per path");
  const std::uint64_t bytes = per_path * config.nvme.paths.size();
  if (bytes != asked)
    std::printf("note: %s is no whole number of blocks per path; %llu bytes are moved\n", options.size.c_str(),
                static_cast<unsigned long long>(bytes));
  NamedPaths others = {{"--engine", options.engine.path()}};
  for (const std::string& path : config.nvme.paths) others.emplace_back("nvme.paths", path);
  require_distinct({{"--json", options.json}}, others);
  OutputFile json_file(options.json);
  StorageBench bench({.paths = config.nvme.paths,
                      .bytes_per_path = per_path,
                      .block_bytes = config.nvme.block_bytes,
                      .queue_depth = config.nvme.queue_depth,
                      .backend = backend_from(config.nvme.backend)});
  using Pattern = StorageBench::Pattern;
  const auto first = bench.prepare();
  const double first_flush = bench.flush_seconds();
  const auto read = bench.run(Pattern::read);
  const auto write = bench.run(Pattern::write);
  const double flush = bench.flush_seconds();
  const auto mixed = bench.run(Pattern::rewrite);

  const double first_flushed = static_cast<double>(first.bytes) / (first.seconds + first_flush);
  const double flushed = static_cast<double>(write.bytes) / (write.seconds + flush);
  const auto line = [](const StorageBench::Result& result) {
    return rate_text(result.bytes_per_second()) + ", " + fixed_text(result.cpu_seconds_per_gigabyte() * 1e3, 1) +
           " ms CPU per GB";
  };
  if (!bench.direct()) std::printf("CACHED: no direct I/O to a drive here, so these are figures of memory\n");
  print_table({{"read", line(read)},
               {"write", line(write)},
               {"write and flush", rate_text(flushed)},
               {"first write, flushed", rate_text(first_flushed)},
               {"mixed (both directions)", line(mixed)},
               {"size, block, depth", base::format_size(bytes) + ", " + base::format_size(config.nvme.block_bytes) +
                                          ", " + std::to_string(config.nvme.queue_depth)},
               {"back end", bench.backend_reason().empty() ? bench.backend_name() : bench.backend_reason()},
               {"memory", bench.memory_note()}});
  if (json_file.wanted()) {
    nlohmann::ordered_json out;
    out["read_bytes_per_second"] = read.bytes_per_second();
    out["write_bytes_per_second"] = write.bytes_per_second();
    out["mixed_bytes_per_second"] = mixed.bytes_per_second();
    out["write_flushed_bytes_per_second"] = flushed;
    out["first_write_bytes_per_second"] = first.bytes_per_second();
    out["first_write_flushed_bytes_per_second"] = first_flushed;
    out["cpu_seconds_per_gigabyte"] = {{"read", read.cpu_seconds_per_gigabyte()},
                                       {"write", write.cpu_seconds_per_gigabyte()},
                                       {"mixed", mixed.cpu_seconds_per_gigabyte()}};
    out["size"] = bytes;
    out["block_size"] = config.nvme.block_bytes;
    out["queue_depth"] = config.nvme.queue_depth;
    out["paths"] = config.nvme.paths;
    out["io_backend"] = bench.backend_name();
    out["direct"] = bench.direct();
    json_file.publish(out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  }
  return 0;
}

}  // namespace

Command add_bench_io(CLI::App& bench) {
  auto options = std::make_shared<Options>();
  CLI::App* parser = bench.add_subcommand("io", "Read, write and mixed rates of the NVMe paths, on a file of its own");
  options->engine.add_to(*parser, false);
  parser
      ->add_option("--path", options->paths,
                   "Directory to measure; may repeat (nvme.paths of the configuration, or run)")
      ->type_name("DIR")
      ->allow_extra_args(false);
  parser->add_option("--size", options->size, "Bytes to move per pass, over all paths")
      ->type_name("SIZE")
      ->capture_default_str();
  parser->add_option("--block-size", options->block_size, "Bytes per request (nvme.block_size)")->type_name("SIZE");
  parser->add_option("--queue-depth", options->queue_depth, "Requests in flight per path (nvme.queue_depth)")
      ->type_name("N")
      ->check(CLI::Range(1, 4096));
  parser->add_option("--backend", options->backend, "auto, io_uring or threads (nvme.backend)")->type_name("NAME");
  parser->add_option("--json", options->json, "Write the figures to FILE")->type_name("FILE");
  return {parser, [options] { return run(*options); }};
}

}  // namespace ballast::cli
