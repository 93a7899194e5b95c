// Device Adam over split state against a plain copy on the device, as bytes read and written per second; and the cost
// of a call of the host on a stream. One line of JSON. Over the stand-in it shows only that the program works.
//
//   device_bench [millions of elements]
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/cuda/cuda_device.h>
#include <ballast/offload/device_kernels.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

namespace {

using ballast::offload::ChunkArrays;
using ballast::offload::UpdateSegment;

constexpr int kRounds = 7;
constexpr int kPerRound = 10;

double median_seconds(ballast::offload::Stream& stream, const std::function<void()>& work) {
  work();
  stream.synchronize();
  std::vector<double> seconds;
  for (int round = 0; round < kRounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kPerRound; ++i) work();
    stream.synchronize();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / kPerRound);
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[kRounds / 2];
}

int run(std::uint64_t elements) {
  const auto device = ballast::cuda::make_cuda_device();
  const auto stream = device->make_stream("compute");
  // parameter 2, remainder 2, moments 4 and 4, gradient 4: 16 bytes held; 16 read and 12 written by an update.
  std::byte* const slab = device->take_slab(16 * elements);
  stream->fill_zero(slab, 16 * elements);
  ChunkArrays arrays;
  arrays.exp_avg = slab;
  arrays.exp_avg_sq = slab + 4 * elements;
  arrays.gradient = slab + 8 * elements;
  arrays.parameter = slab + 12 * elements;
  arrays.master = slab + 14 * elements;
  const ballast::kernels::AdamHyperparameters rates{1e-3, 0.9, 0.95, 1e-8, 0.1, true};
  const UpdateSegment segment{0, elements, ballast::kernels::adam_scalars(rates, 1, 1.0)};
  const double adam = median_seconds(*stream, [&] { device->kernels()->update(*stream, arrays, {&segment, 1}); });
  const double copy = median_seconds(*stream, [&] { stream->copy(slab, slab + 8 * elements, 8 * elements); });
  const double call = median_seconds(*stream, [&] { stream->call({[](void*, std::uint64_t) {}, nullptr, 0}); });
  const double notification = median_seconds(*stream, [&] {
    stream->notify({[](void*, std::uint64_t) {}, nullptr, 0});
  });
  const double adam_rate = 28.0 * static_cast<double>(elements) / adam;
  const double copy_rate = 16.0 * static_cast<double>(elements) / copy;
  std::printf(
      "{\"elements\": %llu, \"adam_bytes_per_second\": %.6g, \"device_copy_bytes_per_second\": %.6g, "
      "\"adam_over_copy\": %.4f, \"adam_parameters_per_second\": %.6g, \"call_seconds\": %.3g, "
      "\"notification_seconds\": %.3g}\n",
      static_cast<unsigned long long>(elements), adam_rate, copy_rate, adam_rate / copy_rate,
      static_cast<double>(elements) / adam, call, notification);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const double millions = argc > 1 ? std::atof(argv[1]) : 256;
  if (millions < 0.01 || millions > 1e5) {
    std::fprintf(stderr, "device_bench: millions of elements, 0.01 or more\n");
    return 2;
  }
  try {
    return run(static_cast<std::uint64_t>(millions * 1e6) / 4096 * 4096);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "device_bench: %s\n", error.what());
    return 1;
  }
}
