// ballast tune: block size and queue depth for the drives, and the rates of this machine's links.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/base/size.h>
#include <ballast/offload/device_registry.h>
#include <ballast/offload/topology.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "bench_adam.h"
#include "bench_copy.h"
#include "command.h"
#include "display.h"
#include "output_file.h"
#include "storage_bench.h"
#include "tune_search.h"

namespace ballast::cli {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;
using Pattern = StorageBench::Pattern;

struct Options {
  EngineOptions engine;
  std::vector<std::string> paths;
  std::string size = "1GiB";
  double seconds = 60;
  bool sweep = false;
  std::string json;
};

constexpr double kMixedPassSeconds = 0.3, kReadPassSeconds = 0.1, kRatePassSeconds = 0.4;
constexpr int kRateSamples = 5;
constexpr std::uint64_t kAdamParameters = std::uint64_t{1} << 25, kCopyBytes = std::uint64_t{256} << 20;

Json to_json(const TuneSamples& samples) {
  return {{"bytes_per_second", samples.median()}, {"spread", samples.spread()}};
}

std::string with_spread(const TuneSamples& samples) {
  return rate_text(samples.median()) + " +- " + fixed_text(samples.spread() * 100, 1) + " %";
}

// Rates of some paths at one block size and depth.
struct PathRates {
  TuneSamples read, write, mixed;
  double duplex() const { return duplex_factor(read.median(), write.median(), mixed.median()); }
};

PathRates measure_paths(const std::vector<std::string>& paths, std::uint64_t bytes_per_path, const TunePoint& point,
                        io::Backend backend) {
  StorageBench bench({.paths = paths,
                      .bytes_per_path = base::round_down(bytes_per_path, point.block_bytes),
                      .block_bytes = point.block_bytes,
                      .queue_depth = point.queue_depth,
                      .backend = backend,
                      .pass_seconds_max = kRatePassSeconds});
  bench.prepare();
  PathRates rates;
  // In turn, as a drive's rate drifts.
  for (int i = 0; i < kRateSamples; ++i) {
    rates.read.rates.push_back(bench.run(Pattern::read).bytes_per_second());
    rates.write.rates.push_back(bench.run(Pattern::write).bytes_per_second());
    rates.mixed.rates.push_back(bench.run(Pattern::rewrite).bytes_per_second());
  }
  return rates;
}

Json to_json(const PathRates& rates) {
  return {{"read", to_json(rates.read)},
          {"write", to_json(rates.write)},
          {"mixed", to_json(rates.mixed)},
          {"duplex_factor", rates.duplex()}};
}

// Files that hold data, which each point reads and rewrites: writing them anew for each would take longer than all
// else.
class MixOfASampledPoint {
 public:
  MixOfASampledPoint(const std::vector<std::string>& paths, std::uint64_t bytes_per_path, io::Backend backend)
      : backend_(backend),
        files_({.paths = paths,
                .bytes_per_path = base::round_down(bytes_per_path, base::kMiB),
                .block_bytes = base::kMiB,
                .queue_depth = 32,
                .backend = backend}) {
    files_.prepare();
  }
  double operator()(const TunePoint& point) const {
    const auto rate = [&](Pattern pattern, double seconds) {
      StorageBench bench({.files = files_.open_files(),
                          .block_bytes = point.block_bytes,
                          .queue_depth = point.queue_depth,
                          .backend = backend_,
                          .pass_seconds_max = seconds});
      return bench.run(pattern).bytes_per_second();
    };
    const double mixed = rate(Pattern::rewrite, kMixedPassSeconds);
    return step_mix_rate(mixed, rate(Pattern::read, kReadPassSeconds));
  }
  const StorageBench& files() const { return files_; }

 private:
  io::Backend backend_;
  StorageBench files_;
};

std::string point_text(const TunePoint& point) {
  return base::format_size(point.block_bytes) + " x " + std::to_string(point.queue_depth);
}

// As --set takes it.
std::string block_option(std::uint64_t bytes) {
  const bool whole = bytes % base::kMiB == 0;
  return std::to_string(bytes / (whole ? base::kMiB : base::kKiB)) + (whole ? "MiB" : "KiB");
}

Json search_json(const std::vector<TuneSamples>& measured) {
  Json list = Json::array();
  for (const TuneSamples& each : measured)
    list.push_back({{"block_size", each.point.block_bytes},
                    {"queue_depth", each.point.queue_depth},
                    {"bytes_per_second", each.rates}});
  return list;
}

// Every point, three times in rounds: what the short search is held against.
std::vector<TuneSamples> sweep(const TuneSpace& space, const MixOfASampledPoint& measure, Progress& progress) {
  constexpr int kRounds = 3;
  std::vector<TuneSamples> all;
  for (const TunePoint& point : space.points()) all.push_back({point, {}});
  const std::size_t samples = kRounds * all.size();
  for (std::size_t i = 0; i < samples; ++i) {
    TuneSamples& each = all[i % all.size()];
    each.rates.push_back(measure(each.point));
    progress.update("sweep: sample " + std::to_string(i + 1) + " of " + std::to_string(samples), i + 1 == samples);
  }
  return all;
}

int run(const Options& options) {
  const Clock::time_point begin = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  Config config = options.engine.load();
  config.nvme.paths = options.paths;
  config.validate();
  const TuneSpace space;
  const std::uint64_t bytes = size_option("--size", options.size);
  if (bytes < 2 * space.in_flight_bytes_most)
    throw ConfigError("--size " + options.size + " is too little to keep the deepest queue busy; at least " +
                      base::format_size(2 * space.in_flight_bytes_most));
  NamedPaths others = {{"--engine", options.engine.path()}};
  for (const std::string& path : options.paths) others.emplace_back("--nvme", path);
  require_distinct({{"--json", options.json}}, others);
  OutputFile json_file(options.json);
  const io::Backend backend = backend_from(config.nvme.backend);

  Json out;
  Progress progress;
  TuneChoice choice;
  std::string backend_name;
  bool direct = true;
  double choice_ratio = 0;
  {
    const MixOfASampledPoint measure(options.paths, bytes, backend);
    backend_name = measure.files().backend_name();
    direct = measure.files().direct();
    int samples = 0;
    choice = tune(
        space,
        [&](const TunePoint& point) {
          progress.update("sample " + std::to_string(++samples) + ": " + point_text(point), false);
          return measure(point);
        },
        [&] { return elapsed() < options.seconds; });
    progress.finish();
    if (options.sweep) {
      const std::vector<TuneSamples> all = sweep(space, measure, progress);
      double best = 0, own = 0;
      for (const TuneSamples& each : all) {
        best = std::max(best, each.median());
        if (each.point == choice.point) own = each.median();
      }
      choice_ratio = own / best;
      out["sweep"] = {{"points", search_json(all)}, {"choice_over_best", choice_ratio}};
    }
  }
  const PathRates together = measure_paths(options.paths, bytes, choice.point, backend);
  std::vector<std::pair<std::string, PathRates>> each_path;
  for (const std::string& path : options.paths)
    each_path.emplace_back(path,
                           options.paths.size() == 1 ? together : measure_paths({path}, bytes, choice.point, backend));
  const int threads = config.threads.value_or(offload::default_thread_count(offload::discover_topology()));
  const AdamBenchResult adam = run_adam_bench(kAdamParameters, threads);
  const std::string device = config.device == "auto" ? offload::automatic_device() : config.device;
  const CopyBenchResult copy = run_copy_bench(device, kCopyBytes, 5);

  const TuneSamples& chosen = choice.chosen();
  if (!direct) std::printf("CACHED: no direct I/O to a drive here, so these are figures of memory\n");
  std::vector<std::pair<std::string, std::string>> rows = {
      {"block size, queue depth", point_text(choice.point)},
      {"rate of a step's mix, 14 read : 12 written", with_spread(chosen)},
      {"how sure", (choice.clear ? "settled by " : "time ended after ") + std::to_string(choice.measured.size()) +
                       " points; as good: " + std::to_string(choice.as_good.size() - 1) + " more"},
      {"read, write", with_spread(together.read) + ", " + with_spread(together.write)},
      {"mixed (both directions)", with_spread(together.mixed)},
      {"duplex factor (1: directions share the drive)", fixed_text(together.duplex(), 2)},
      {"update in memory", count_text(adam.parameters_per_second) + " parameters/s"},
      {"rewriting memory, copying it", rate_text(adam.rewrite_bytes_per_second) + ", " + rate_text(copy.in_memory)}};
  if (options.paths.size() > 1)
    for (const auto& [path, rates] : each_path)
      rows.push_back({path, with_spread(rates.read) + " read, " + with_spread(rates.write) + " written, " +
                                with_spread(rates.mixed) + " mixed"});
  if (device != "host")
    rows.push_back({"host to " + device + ", back, both",
                    rate_text(copy.to_device) + ", " + rate_text(copy.to_host) + ", " + rate_text(copy.both)});
  if (options.sweep) rows.push_back({"choice over the sweep's best point", fixed_text(choice_ratio, 3)});
  rows.push_back({"took", fixed_text(elapsed(), 0) + " s"});
  print_table(rows);
  std::printf("use it: --set nvme.block_size=%s --set nvme.queue_depth=%u\n",
              block_option(choice.point.block_bytes).c_str(), choice.point.queue_depth);
  if (json_file.wanted()) {
    out["block_size"] = choice.point.block_bytes;
    out["queue_depth"] = choice.point.queue_depth;
    out["step_mix"] = to_json(chosen);
    out["clear"] = choice.clear;
    Json as_good = Json::array();
    for (const TunePoint& point : choice.as_good)
      as_good.push_back({{"block_size", point.block_bytes}, {"queue_depth", point.queue_depth}});
    out["as_good"] = std::move(as_good);
    out["search"] = search_json(choice.measured);
    out["together"] = to_json(together);
    Json paths = Json::array();
    for (const auto& [path, rates] : each_path) {
      Json one = to_json(rates);
      one["path"] = path;
      paths.push_back(std::move(one));
    }
    out["paths"] = std::move(paths);
    out["adam"] = {{"parameters_per_second", adam.parameters_per_second},
                   {"bytes_per_second", adam.bytes_per_second},
                   {"rewrite_bytes_per_second", adam.rewrite_bytes_per_second},
                   {"threads", adam.threads},
                   {"instruction_set", adam.instruction_set}};
    out["copy"] = {{"memory_bytes_per_second", copy.in_memory}, {"device", device}};
    if (device != "host") {
      out["copy"]["host_to_device_bytes_per_second"] = copy.to_device;
      out["copy"]["device_to_host_bytes_per_second"] = copy.to_host;
      out["copy"]["duplex_bytes_per_second"] = copy.both;
    }
    out["io_backend"] = backend_name;
    out["direct"] = direct;
    out["seconds"] = elapsed();
    json_file.publish(out.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  }
  return 0;
}

}  // namespace

Command add_tune(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* parser =
      app.add_subcommand("tune", "Find block size and queue depth for the drives, and measure this machine");
  parser->add_option("--nvme", options->paths, "Directories on the drives to measure")->type_name("DIR")->required();
  options->engine.add_to(*parser, false);
  parser->add_option("--size", options->size, "Bytes to write on each path, and to move there")
      ->type_name("SIZE")
      ->capture_default_str();
  parser->add_option("--seconds", options->seconds, "The search ends after that, if nothing is clear before")
      ->type_name("S")
      ->check(CLI::Range(1.0, 3600.0))
      ->capture_default_str();
  parser->add_flag("--sweep", options->sweep, "Then also measure every point, and hold the choice against the best");
  parser->add_option("--json", options->json, "Write all figures to FILE")->type_name("FILE");
  return {parser, [options] { return run(*options); }};
}

}  // namespace ballast::cli
