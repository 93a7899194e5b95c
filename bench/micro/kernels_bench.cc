// Each kernel on each instruction set, beside a copy and a rewrite in place of as many bytes. One thread; `/small` runs
// in the cache, `/large` over arrays of 256 MiB and more. bytes_per_second counts bytes read and written.
// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "ballast/kernels/adam.h"
#include "ballast/kernels/convert.h"
#include "ballast/kernels/reduce.h"
#include "ballast/kernels/targets.h"
#include "micro/yardsticks.h"

namespace ballast::kernels {
namespace {

constexpr std::size_t kSmall = std::size_t{1} << 12;
constexpr std::size_t kLarge = std::size_t{1} << 26;

// Some pages over a power of two: arrays that differ only in bits above the 27th share the tag by which an AMD core
// finds a line in its first-level cache, and evict each other.
constexpr std::size_t kArrayBytes = kLarge * sizeof(float) + 37 * 4096;

// Five arrays of fp32 (or of bf16, in half the bytes), huge pages where the system gives them; made once.
std::byte* array(int index) {
  constexpr int kArrays = 5;
  static std::byte* const base = [] {
    const std::size_t bytes = kArrays * kArrayBytes;
    void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
      std::perror("kernels_bench: 1.25 GiB of memory");
      std::exit(1);
    }
    ::madvise(mapped, bytes, MADV_HUGEPAGE);  // advice: without it the figures are those of small pages
    std::memset(mapped, 0x3C, bytes);         // positive, finite, normal in every format
    return static_cast<std::byte*>(mapped);
  }();
  return base + static_cast<std::size_t>(index) * kArrayBytes;
}
float* fp32(int index) { return reinterpret_cast<float*>(array(index)); }
std::uint16_t* bf16(int index) { return reinterpret_cast<std::uint16_t*>(array(index)); }

AdamArrays adam_arrays(ParameterFormat parameter, ElementType moment, ElementType gradient) {
  AdamArrays a;
  a.parameter_format = parameter;
  a.moment_type = moment;
  a.gradient_type = gradient;
  a.parameter = array(0);
  a.master = array(1);
  a.exp_avg = array(2);
  a.exp_avg_sq = array(3);
  a.gradient = array(4);
  return a;
}

template <class Body>
void add(const std::string& name, const std::string& target, std::size_t bytes_per_element, Body body) {
  for (const bool large : {false, true}) {
    const std::size_t count = large ? kLarge : kSmall;
    const std::string full = name + "/" + target + (large ? "/large" : "/small");
    benchmark::RegisterBenchmark(full.c_str(), [=](benchmark::State& state) {
      if (!force_target(target)) {
        state.SkipWithError("this instruction set does not run here");
        return;
      }
      array(0);
      for (auto _ : state) {
        body(count);
        benchmark::ClobberMemory();
      }
      const auto elements = static_cast<std::int64_t>(count) * static_cast<std::int64_t>(state.iterations());
      state.SetItemsProcessed(elements);
      state.SetBytesProcessed(elements * static_cast<std::int64_t>(bytes_per_element));
    })->UseRealTime();
  }
}

void add_adam(const std::string& target) {
  const AdamHyperparameters hyperparameters{
      .learning_rate = 1e-4, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = 0.01, .decoupled = true};
  const AdamScalars scalars = adam_scalars(hyperparameters, 10, 1.0);
  const auto variant = [&](const char* name, ParameterFormat parameter, ElementType moment, ElementType gradient,
                           std::size_t bytes) {
    const AdamArrays arrays = adam_arrays(parameter, moment, gradient);
    add(name, target, bytes, [=](std::size_t count) { adam(scalars, arrays, count); });
  };
  variant("adam_split", ParameterFormat::split_bf16, ElementType::fp32, ElementType::bf16, 26);
  variant("adam_split_fp32_gradient", ParameterFormat::split_bf16, ElementType::fp32, ElementType::fp32, 28);
  variant("adam_split_bf16_moments", ParameterFormat::split_bf16, ElementType::bf16, ElementType::bf16, 18);
  variant("adam_split_int8_moments", ParameterFormat::split_bf16, ElementType::int8, ElementType::bf16, 14);
  variant("adam_fp16", ParameterFormat::fp16, ElementType::fp32, ElementType::fp32, 30);
  variant("adam_fp32", ParameterFormat::fp32, ElementType::fp32, ElementType::fp32, 28);
}

void add_all(const std::string& target) {
  add("copy", target, 8, [](std::size_t count) { std::memcpy(fp32(1), fp32(0), count * sizeof(float)); });
  add("rewrite", target, 8, [](std::size_t count) { yardsticks::rewrite(fp32(0), count * sizeof(float)); });
  add_adam(target);
  add("fp32_to_bf16", target, 6, [](std::size_t count) { fp32_to_bf16(fp32(0), bf16(1), count); });
  add("bf16_to_fp32", target, 6, [](std::size_t count) { bf16_to_fp32(bf16(0), fp32(1), count); });
  add("fp32_to_fp16", target, 6, [](std::size_t count) { fp32_to_fp16(fp32(0), bf16(1), count); });
  add("fp16_to_fp32", target, 6, [](std::size_t count) { fp16_to_fp32(bf16(0), fp32(1), count); });
  add("split", target, 8, [](std::size_t count) { split_fp32(fp32(0), bf16(1), bf16(2), count); });
  add("merge", target, 8, [](std::size_t count) { merge_fp32(bf16(1), bf16(2), fp32(0), count); });
  add("accumulate_fp32", target, 12, [](std::size_t count) { accumulate_fp32(fp32(0), fp32(4), 1e-9f, count); });
  add("accumulate_bf16", target, 6, [](std::size_t count) { accumulate_bf16(bf16(0), bf16(4), 1e-9f, count); });
  static std::vector<double> sums(kLarge / kSumBlock);
  add("sum_of_squares_fp32", target, 4, [](std::size_t count) { sum_of_squares_fp32(fp32(4), count, sums.data()); });
  add("sum_of_squares_bf16", target, 2, [](std::size_t count) { sum_of_squares_bf16(bf16(4), count, sums.data()); });
  add("all_finite_fp32", target, 4,
      [](std::size_t count) { benchmark::DoNotOptimize(all_finite_fp32(fp32(4), count)); });
  add("all_finite_bf16", target, 2,
      [](std::size_t count) { benchmark::DoNotOptimize(all_finite_bf16(bf16(4), count)); });
}

}  // namespace
}  // namespace ballast::kernels

int main(int argc, char** argv) {
  for (const std::string& target : ballast::kernels::supported_targets()) ballast::kernels::add_all(target);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
