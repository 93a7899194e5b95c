// ballast bench collective: what ranks gather and reduce, by size. Run it under the launcher that will train.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/base/error.h>
#include <ballast/base/size.h>
#include <ballast/offload/device.h>
#include <ballast/offload/device_registry.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "command.h"
#include "display.h"
#include "interrupt.h"
#include "output_file.h"
#include "ranks.h"

namespace ballast::cli {
namespace {

struct Options {
  EngineOptions engine;
  std::string smallest = "1MiB", largest = "64MiB";
  int iterations = 10;
  std::string json;
};

enum class Operation { all_gather, reduce_scatter, all_reduce };
constexpr const char* kNames[] = {"all_gather", "reduce_scatter", "all_reduce"};

struct Measured {
  Operation operation;
  std::uint64_t bytes;
  double seconds;
  double algorithm_bytes_per_second() const { return static_cast<double>(bytes) / seconds; }
  // As nccl-tests defines it: what each rank's link carries, whatever the algorithm.
  double bus_bytes_per_second(int ranks) const {
    const double share = static_cast<double>(ranks - 1) / ranks;
    return algorithm_bytes_per_second() * (operation == Operation::all_reduce ? 2 * share : share);
  }
};

void enqueue(Operation operation, Communicator& ranks, std::byte* data, std::uint64_t bytes, offload::Stream& stream) {
  const auto size = static_cast<std::uint64_t>(ranks.world_size());
  const std::uint64_t part = bytes / size;
  switch (operation) {
    case Operation::all_gather:
      ranks.all_gather(data, part, stream);
      return;
    case Operation::reduce_scatter:
      ranks.reduce_scatter_sum(data, data + part * static_cast<std::uint64_t>(ranks.rank()), part / 4, DataType::fp32,
                               stream);
      return;
    case Operation::all_reduce:
      ranks.all_reduce_sum(data, bytes / 4, DataType::fp32, stream);
      return;
  }
}

// As the engine's device memory is; what the transport refuses works all the same, slower.
class Registered {
 public:
  Registered(Communicator& ranks, std::span<std::byte> buffer) : ranks_(ranks), buffer_(buffer) {
    std::string reason;
    if (!ranks_.register_buffer(buffer_, &reason))
      std::printf("note: the buffer is not registered: %s\n", reason.c_str());
  }
  ~Registered() { ranks_.unregister_buffer(buffer_); }
  Registered(const Registered&) = delete;
  Registered& operator=(const Registered&) = delete;

 private:
  Communicator& ranks_;
  std::span<std::byte> buffer_;
};

int measure(const Options& options, const Config& config, Communicator& ranks) {
  const std::uint64_t smallest = size_option("--smallest", options.smallest);
  const std::uint64_t largest = size_option("--largest", options.largest);
  if (smallest > largest) throw ConfigError("--smallest " + options.smallest + " is more than --largest");
  OutputFile json_file(on_first_rank(ranks, options.json));
  const std::string kind = config.device == "auto" ? offload::automatic_device() : config.device;
  const std::unique_ptr<offload::Device> device =
      kind == "host" ? offload::make_host_device() : offload::device_backend(kind).make(-1);
  const auto world_size = static_cast<std::uint64_t>(ranks.world_size());
  const std::uint64_t granule = world_size * 256;
  std::byte* const data = device->take_slab(base::round_up(largest, granule));
  const std::unique_ptr<offload::Stream> stream = device->make_stream("collective");
  const Registered registered(ranks, {data, base::round_up(largest, granule)});
  if (device->host_addressable()) std::memset(data, 0, base::round_up(largest, granule));

  std::vector<Measured> results;
  for (const Operation operation : {Operation::all_gather, Operation::reduce_scatter, Operation::all_reduce}) {
    for (std::uint64_t asked = smallest; asked <= largest; asked *= 4) {
      InterruptGuard::check();
      const std::uint64_t bytes = base::round_up(asked, granule);
      enqueue(operation, ranks, data, bytes, *stream);  // warms up
      stream->synchronize();
      ranks.barrier();
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < options.iterations; ++i) enqueue(operation, ranks, data, bytes, *stream);
      stream->synchronize();
      ranks.check();
      double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      ranks.all_reduce_sum({&seconds, 1});
      results.push_back({operation, bytes, seconds / static_cast<double>(world_size) / options.iterations});
    }
  }
  std::printf("%d ranks, %s; algorithm and bus bandwidth\n", ranks.world_size(), std::string(ranks.name()).c_str());
  std::vector<std::pair<std::string, std::string>> rows;
  for (const Measured& each : results) {
    rows.emplace_back(std::string(kNames[static_cast<int>(each.operation)]) + ", " + base::format_size(each.bytes),
                      rate_text(each.algorithm_bytes_per_second()) + ", " +
                          rate_text(each.bus_bytes_per_second(ranks.world_size())) + ", " +
                          fixed_text(each.seconds * 1e6, 0) + " us");
  }
  print_table(rows);
  if (json_file.wanted()) {
    nlohmann::ordered_json out;
    out["world_size"] = ranks.world_size();
    out["communicator"] = ranks.name();
    out["device"] = kind;
    out["iterations"] = options.iterations;
    for (const Measured& each : results) {
      out["results"].push_back({{"operation", kNames[static_cast<int>(each.operation)]},
                                {"bytes", each.bytes},
                                {"seconds", each.seconds},
                                {"algorithm_bytes_per_second", each.algorithm_bytes_per_second()},
                                {"bus_bytes_per_second", each.bus_bytes_per_second(ranks.world_size())}});
    }
    json_file.publish(out.dump(2) + "\n");
  }
  return 0;
}

int run(const Options& options) {
  const Config config = options.engine.load();
  return run_on_ranks(config,
                      [&](const std::shared_ptr<Communicator>& ranks) { return measure(options, config, *ranks); });
}

}  // namespace

Command add_bench_collective(CLI::App& bench) {
  auto options = std::make_shared<Options>();
  CLI::App* parser = bench.add_subcommand("collective", "Gathering and reducing over all ranks of the launch");
  options->engine.add_to(*parser, false);
  parser->add_option("--smallest", options->smallest, "First size; each is four times the one before")
      ->capture_default_str();
  parser->add_option("--largest", options->largest, "No size beyond this")->capture_default_str();
  parser->add_option("--iterations", options->iterations, "Calls per size")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  parser->add_option("--json", options->json, "Write the figures to FILE")->type_name("FILE");
  return {parser, [options] { return run(*options); }};
}

}  // namespace ballast::cli
