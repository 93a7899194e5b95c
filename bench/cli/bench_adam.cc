// The bench behind `ballast bench adam`.
// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_adam.h"

#include <ballast/base/error.h>
#include <ballast/kernels/adam.h>
#include <ballast/kernels/convert.h>
#include <ballast/kernels/moments.h>
#include <ballast/kernels/targets.h>
#include <ballast/offload/cpu_pool.h>
#include <ballast/offload/topology.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "cli/interrupt.h"
#include "micro/yardsticks.h"

namespace ballast::cli {
namespace {

using kernels::AdamArrays;
using kernels::AdamScalars;

// Elements a thread takes at once: enough to hide the hand-over, few enough to end together.
constexpr std::size_t kGrain = std::size_t{1} << 18;
constexpr int kFewestRounds = 5;
constexpr int kMostRounds = 41;
constexpr double kRoundsSeconds = 3.0;

// The arrays in one mapping on huge pages, each some pages over a power of two from the last: arrays whose addresses
// differ in high bits only share a tag in an AMD core's first-level cache and evict each other.
class Arrays {
 public:
  Arrays(std::size_t count, kernels::ElementType moments) : count_(count), moments_(moments) {
    std::size_t bytes = 0;
    std::array<std::size_t, kArrays> offsets{};
    for (int a = 0; a < kArrays; ++a) {
      offsets[a] = bytes;
      bytes += (bytes_of(static_cast<Name>(a), count) + kPage - 1) / kPage * kPage + 37 * kPage;
    }
    const std::uint64_t available = offload::free_memory_bytes(offload::discover_topology());
    if (bytes > available) {
      throw ConfigError("bench adam: " + std::to_string(count) + " parameters take " + std::to_string(bytes) +
                        " bytes and " + std::to_string(available) + " are free; ask for fewer --parameters");
    }
    mapping_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping_ == MAP_FAILED) {
      throw ConfigError("bench adam: no " + std::to_string(bytes) + " bytes of memory for " + std::to_string(count) +
                        " parameters: " + std::strerror(errno) + "; ask for fewer --parameters");
    }
    bytes_ = bytes;
    ::madvise(mapping_, bytes, MADV_HUGEPAGE);  // advice: on small pages all three run slower alike
    for (int a = 0; a < kArrays; ++a) data_[a] = static_cast<std::byte*>(mapping_) + offsets[a];
  }
  ~Arrays() { ::munmap(mapping_, bytes_); }
  Arrays(const Arrays&) = delete;
  Arrays& operator=(const Arrays&) = delete;

  enum Name {
    kParameter,
    kRemainder,
    kExpAvg,
    kExpAvgSq,
    kGradient,
    kWideParameter,
    kWideGradient,
    kCast,
    kWideExpAvg,
    kWideExpAvgSq,
    kArrays
  };
  // The first five are the update's own; the others are what three passes need beside the gradient. Those are the usual
  // ones, over fp32 moments, which are the update's where that has such.
  static constexpr int kOwn = kWideParameter;

  // Of the elements before one; with 8-bit moments the first of a block.
  std::size_t bytes_of(Name name, std::size_t elements) const {
    constexpr std::array<std::size_t, kArrays> kElementBytes = {2, 2, 4, 4, 2, 4, 4, 2, 4, 4};
    if (name >= kWideExpAvg && moments_ == kernels::ElementType::fp32) return 0;
    if (name != kExpAvg && name != kExpAvgSq) return elements * kElementBytes[name];
    if (moments_ != kernels::ElementType::int8) return elements * (moments_ == kernels::ElementType::fp32 ? 4 : 2);
    return (elements + kernels::kMomentBlock - 1) / kernels::kMomentBlock * kernels::kMomentBlockBytes;
  }
  kernels::ElementType moments() const { return moments_; }
  Name wide(Name moment) const {
    if (moments_ == kernels::ElementType::fp32) return moment;
    return moment == kExpAvg ? kWideExpAvg : kWideExpAvgSq;
  }

  std::byte* at(Name name, std::size_t element) const { return data_[name] + bytes_of(name, element); }
  template <class T>
  T* as(Name name, std::size_t element) const {
    return reinterpret_cast<T*>(at(name, element));
  }
  std::size_t count() const { return count_; }

 private:
  static constexpr std::size_t kPage = 4096;
  std::size_t count_;
  kernels::ElementType moments_;
  std::size_t bytes_ = 0;
  void* mapping_ = nullptr;
  std::array<std::byte*, kArrays> data_{};
};

AdamArrays one_pass_arrays(const Arrays& arrays, std::size_t begin) {
  AdamArrays a;
  a.moment_type = arrays.moments();
  a.gradient_type = kernels::ElementType::bf16;
  a.parameter = arrays.at(Arrays::kParameter, begin);
  a.master = arrays.at(Arrays::kRemainder, begin);
  a.exp_avg = arrays.at(Arrays::kExpAvg, begin);
  a.exp_avg_sq = arrays.at(Arrays::kExpAvgSq, begin);
  a.gradient = arrays.at(Arrays::kGradient, begin);
  return a;
}

class Bench {
 public:
  Bench(std::size_t count, int threads, kernels::ElementType moments)
      : pool_(offload::make_tbb_pool(threads)),
        arrays_(count, moments),
        scalars_(kernels::adam_scalars(kUpdate, 100, 1.0 / 64)) {
    in_parallel([&](std::size_t begin, std::size_t end) {  // also places the pages, and none holds a subnormal number
      const auto fill = [&](Arrays::Name name, int value) {
        std::memset(arrays_.at(name, begin), value, arrays_.bytes_of(name, end - begin));
      };
      fill(Arrays::kRemainder, 0x11);
      for (const auto name :
           {Arrays::kParameter, Arrays::kExpAvg, Arrays::kExpAvgSq, Arrays::kGradient, Arrays::kWideParameter,
            Arrays::kWideGradient, Arrays::kCast, Arrays::kWideExpAvg, Arrays::kWideExpAvgSq}) {
        fill(name, 0x3C);
      }
    });
  }

  double one_pass() {
    return seconds_of([&](std::size_t begin, std::size_t end) {
      kernels::adam(scalars_, one_pass_arrays(arrays_, begin), end - begin);
    });
  }

  double rewrite() {
    return seconds_of([&](std::size_t begin, std::size_t end) {
      for (int a = 0; a < Arrays::kOwn; ++a) {
        const auto name = static_cast<Arrays::Name>(a);
        yardsticks::rewrite(arrays_.at(name, begin), arrays_.bytes_of(name, end - begin));
      }
    });
  }

  double three_passes() {
    AdamScalars unscaled = scalars_;
    unscaled.gradient_scale = 1.0F;
    const double unscale = seconds_of([&](std::size_t begin, std::size_t end) {
      yardsticks::unscale_bf16(arrays_.as<std::uint16_t>(Arrays::kGradient, begin), scalars_.gradient_scale,
                               arrays_.as<float>(Arrays::kWideGradient, begin), end - begin);
    });
    const double update = seconds_of([&](std::size_t begin, std::size_t end) {
      AdamArrays a;
      a.parameter_format = kernels::ParameterFormat::fp32;
      a.parameter = arrays_.at(Arrays::kWideParameter, begin);
      a.exp_avg = arrays_.at(arrays_.wide(Arrays::kExpAvg), begin);
      a.exp_avg_sq = arrays_.at(arrays_.wide(Arrays::kExpAvgSq), begin);
      a.gradient = arrays_.at(Arrays::kWideGradient, begin);
      kernels::adam(unscaled, a, end - begin);
    });
    const double cast = seconds_of([&](std::size_t begin, std::size_t end) {
      kernels::fp32_to_bf16(arrays_.as<float>(Arrays::kWideParameter, begin),
                            arrays_.as<std::uint16_t>(Arrays::kCast, begin), end - begin);
    });
    return unscale + update + cast;
  }

  int threads() const { return pool_->threads(); }
  // Of all the update's arrays, and of the gradient among them.
  double own_bytes() const {
    double bytes = 0.0;
    for (int a = 0; a < Arrays::kOwn; ++a) bytes += bytes_of(static_cast<Arrays::Name>(a));
    return bytes;
  }
  double gradient_bytes() const { return bytes_of(Arrays::kGradient); }

 private:
  static constexpr kernels::AdamHyperparameters kUpdate{
      .learning_rate = 1e-4, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = 0.01, .decoupled = true};

  double bytes_of(Arrays::Name name) const { return static_cast<double>(arrays_.bytes_of(name, arrays_.count())); }
  template <class Body>
  void in_parallel(const Body& body) {
    InterruptGuard::check();
    offload::parallel_for(*pool_, arrays_.count(), kGrain, body);
  }
  template <class Body>
  double seconds_of(const Body& body) {
    const auto start = std::chrono::steady_clock::now();
    in_parallel(body);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  std::unique_ptr<offload::CpuPool> pool_;
  Arrays arrays_;
  AdamScalars scalars_;
};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

AdamBenchResult run_adam_bench(std::uint64_t parameters, int threads, MomentType moments) {
  if (parameters == 0) throw ConfigError("bench adam: 0 parameters; ask for 1 or more --parameters");
  const auto count = static_cast<std::size_t>(parameters);
  Bench bench(count, threads,
              moments == MomentType::int8   ? kernels::ElementType::int8
              : moments == MomentType::bf16 ? kernels::ElementType::bf16
                                            : kernels::ElementType::fp32);
  std::vector<double> one_pass, rewrite, three_passes;
  const auto start = std::chrono::steady_clock::now();
  for (int round = 0; round < kMostRounds; ++round) {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    if (round > kFewestRounds && spent.count() > kRoundsSeconds) break;
    // Forwards and backwards in turn, so that a drift of the machine weighs on none more than on another.
    if (round % 2 == 0) one_pass.push_back(bench.one_pass());
    if (round % 2 != 0) three_passes.push_back(bench.three_passes());
    rewrite.push_back(bench.rewrite());
    if (round % 2 == 0) three_passes.push_back(bench.three_passes());
    if (round % 2 != 0) one_pass.push_back(bench.one_pass());
  }
  const double elements = static_cast<double>(count);
  AdamBenchResult result;
  result.parameters_per_second = elements / median(one_pass);
  // The update reads all of its arrays and writes all but the gradient.
  result.bytes_per_second = (2.0 * bench.own_bytes() - bench.gradient_bytes()) / median(one_pass);
  result.rewrite_bytes_per_second = 2.0 * bench.own_bytes() / median(rewrite);
  result.three_pass_parameters_per_second = elements / median(three_passes);
  result.threads = bench.threads();
  result.instruction_set = kernels::active_target();
  return result;
}

}  // namespace ballast::cli
