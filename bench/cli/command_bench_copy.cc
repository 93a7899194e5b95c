// ballast bench copy: copies between host and device, each way and both at once, against a plain copy in memory.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/base/size.h>
#include <ballast/offload/device.h>
#include <ballast/offload/device_registry.h>
#include <ballast/offload/slab.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "command.h"
#include "display.h"
#include "interrupt.h"
#include "output_file.h"

namespace ballast::cli {
namespace {

struct Options {
  EngineOptions engine;
  std::string size = "256MiB";
  int iterations = 9;
  std::string json;
};

double median_seconds(int iterations, const std::function<void()>& work) {
  std::vector<double> seconds;
  work();  // touches the pages
  for (int i = 0; i < iterations; ++i) {
    InterruptGuard::check();
    const auto begin = std::chrono::steady_clock::now();
    work();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

int run(const Options& options) {
  const Config config = options.engine.load();
  const std::uint64_t bytes = base::round_up(size_option("--size", options.size), 4096);
  OutputFile json_file(options.json);
  const std::string kind = config.device == "auto" ? offload::automatic_device() : config.device;
  const std::unique_ptr<offload::Device> device =
      kind == "host" ? offload::make_host_device() : offload::device_backend(kind).make(-1);
  offload::HostSlab slab({.bytes = 2 * bytes, .check_interrupt = &InterruptGuard::check});
  std::byte* const up = slab.take("up", bytes, 4096);
  std::byte* const down = slab.take("down", bytes, 4096);
  const std::unique_ptr<std::byte[]> pageable(new std::byte[bytes]());
  device->register_host_memory(slab.memory());
  std::byte* const far = device->take_slab(2 * bytes);
  auto in = device->make_stream("in");
  auto out = device->make_stream("out");
  const auto rate = [&](std::uint64_t moved, const std::function<void()>& work) {
    return static_cast<double>(moved) / median_seconds(options.iterations, work);
  };
  const double to_device = rate(bytes, [&] {
    in->copy(far, up, bytes);
    in->synchronize();
  });
  const double to_host = rate(bytes, [&] {
    out->copy(down, far, bytes);
    out->synchronize();
  });
  const double both = rate(2 * bytes, [&] {
    in->copy(far, up, bytes);
    out->copy(down, far + bytes, bytes);
    in->synchronize();
    out->synchronize();
  });
  const double unpinned = rate(bytes, [&] {
    in->copy(far, pageable.get(), bytes);
    in->synchronize();
  });
  const double in_memory = rate(bytes, [&] { std::memcpy(down, up, bytes); });
  in.reset();
  out.reset();
  device->unregister_host_memory(slab.memory());
  print_table({{"host to device", rate_text(to_device)},
               {"device to host", rate_text(to_host)},
               {"both at once, together", rate_text(both)},
               {"host to device, memory not registered", rate_text(unpinned)},
               {"a copy in host memory", rate_text(in_memory)},
               {"device, size", kind + ", " + base::format_size(bytes)}});
  if (json_file.wanted()) {
    nlohmann::ordered_json figures;
    figures["host_to_device_bytes_per_second"] = to_device;
    figures["device_to_host_bytes_per_second"] = to_host;
    figures["duplex_bytes_per_second"] = both;
    figures["pageable_host_to_device_bytes_per_second"] = unpinned;
    figures["memory_copy_bytes_per_second"] = in_memory;
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
