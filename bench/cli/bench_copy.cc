// The bench behind `ballast bench copy`.
// SPDX-License-Identifier: Apache-2.0
#include "bench_copy.h"

#include <ballast/offload/device.h>
#include <ballast/offload/device_registry.h>
#include <ballast/offload/slab.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "interrupt.h"

namespace ballast::cli {
namespace {

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

}  // namespace

CopyBenchResult run_copy_bench(const std::string& device_kind, std::uint64_t bytes, int iterations) {
  const std::unique_ptr<offload::Device> device =
      device_kind == "host" ? offload::make_host_device() : offload::device_backend(device_kind).make(-1);
  offload::HostSlab slab({.bytes = 2 * bytes, .check_interrupt = &InterruptGuard::check});
  std::byte* const up = slab.take("up", bytes, 4096);
  std::byte* const down = slab.take("down", bytes, 4096);
  const std::unique_ptr<std::byte[]> pageable(new std::byte[bytes]());
  device->register_host_memory(slab.memory());
  std::byte* const far = device->take_slab(2 * bytes);
  auto in = device->make_stream("in");
  auto out = device->make_stream("out");
  CopyBenchResult result;
  const auto rate = [&](std::uint64_t moved, const std::function<void()>& work) {
    return static_cast<double>(moved) / median_seconds(iterations, work);
  };
  result.to_device = rate(bytes, [&] {
    in->copy(far, up, bytes);
    in->synchronize();
  });
  result.to_host = rate(bytes, [&] {
    out->copy(down, far, bytes);
    out->synchronize();
  });
  result.both = rate(2 * bytes, [&] {
    in->copy(far, up, bytes);
    out->copy(down, far + bytes, bytes);
    in->synchronize();
    out->synchronize();
  });
  result.unpinned = rate(bytes, [&] {
    in->copy(far, pageable.get(), bytes);
    in->synchronize();
  });
  result.in_memory = rate(bytes, [&] { std::memcpy(down, up, bytes); });
  in.reset();
  out.reset();
  device->unregister_host_memory(slab.memory());
  return result;
}

}  // namespace ballast::cli
