// Whole steps on the CUDA device over the stand-in: the same numbers, bit for bit, as on the host device, whatever the
// placement, the timing and the order in which streams run; and each failure of a CUDA call ends in the right error.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/cuda/cuda_device.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <standin/standin.h>

#include <cstdlib>

#include "gpt/model.h"
#include "support/random_case.h"
#include "support/under_thread_sanitizer.h"

namespace ballast {
namespace {

using testing::Case;
using ::testing::HasSubstr;
using testing::make_case;
using testing::Outcome;
using testing::plain_config;
using testing::run_case;
using testing::SyntheticOptions;
using testing::SyntheticTrainer;
using testing::TemporaryDirectory;
using testing::Watchdog;

// The trainer's kernels are host code here too, in order with the stream.
void on_device(SyntheticOptions& options) {
  options.run = [](Stream stream, std::function<void()> work) {
    const auto on = static_cast<cudaStream_t>(stream.native_handle());
    if (const cudaError_t result = standin::launch(on, std::move(work)); result != cudaSuccess) {
      throw Error(std::string("the trainer's kernel: ") + cudaGetErrorName(result));
    }
  };
  options.view = [](void* data) { return standin::host_view(data); };
}

EngineEnvironment cuda_environment() {
  EngineEnvironment environment;
  environment.device = std::shared_ptr<offload::Device>(cuda::make_cuda_device());
  return environment;
}

Outcome run_on_device(Case c, const Config& config, std::uint64_t timing_seed) {
  standin::reset();
  standin::configure({.timing_seed = timing_seed});
  on_device(c.options);
  Outcome outcome = run_case(c, config, cuda_environment());
  EXPECT_EQ(standin::live().total(), 0u) << "something was not given back";
  return outcome;
}

void expect_same(const Outcome& found, const Outcome& expected) {
  EXPECT_EQ(found.losses, expected.losses);
  EXPECT_EQ(found.norms, expected.norms);
  ASSERT_EQ(found.values.size(), expected.values.size());
  EXPECT_EQ(std::memcmp(found.values.data(), expected.values.data(), 4 * expected.values.size()), 0);
}

// The units of a GPT, about those of configs/models/gpt-tiny.json with narrower blocks.
Case gpt_case() {
  gpt::GptShape shape;
  shape.layers = 5;
  shape.width = 64;
  shape.heads = 4;
  shape.context = 128;
  shape.vocabulary = 256;
  Case c;
  for (gpt::GptUnit& unit : gpt::gpt_units(shape)) c.model.push_back({unit.name, unit.parameters, true});
  c.type = "adamw";
  return c;
}

TEST(StandInEngine, AGptTrainsAsOnTheHostDeviceInEveryPlacementAndTiming) {
  const Watchdog watchdog(250);
  const Case c = gpt_case();
  const TemporaryDirectory directory;
  const Outcome expected = run_case(c, plain_config(directory.path(), Tier::device, Timing::after_backward), {});
  for (Timing timing : {Timing::after_backward, Timing::just_in_time, Timing::eager}) {
    for (int tiers = 0; tiers < 18; ++tiers) {
      Config config = plain_config(directory.path(), Tier::nvme, timing);
      config.placement.parameters = static_cast<Tier>(tiers % 3);
      config.placement.optimizer = static_cast<Tier>(tiers / 3 % 3);
      config.placement.gradients = static_cast<Tier>(tiers / 9);
      SCOPED_TRACE(std::string(to_string(timing)) + ", parameters " +
                   std::string(to_string(config.placement.parameters)) + ", optimizer " +
                   std::string(to_string(config.placement.optimizer)) + ", gradients " +
                   std::string(to_string(config.placement.gradients)));
      expect_same(run_on_device(c, config, 0), expected);
    }
  }
}

// BALLAST_STANDIN_SEEDS sets how many; a seed is the test's only input.
TEST(StandInEngine, RandomModelsInRandomStreamTimingsEqualThePlainRun) {
  const char* wanted = std::getenv("BALLAST_STANDIN_SEEDS");
  const std::uint64_t seeds = wanted != nullptr ? std::strtoull(wanted, nullptr, 10) : 24;
  const char* first = std::getenv("BALLAST_STANDIN_FIRST_SEED");
  const std::uint64_t begin = first != nullptr ? std::strtoull(first, nullptr, 10) : 1;
  const TemporaryDirectory directory;
  for (std::uint64_t seed = begin; seed < begin + seeds; ++seed) {
    SCOPED_TRACE("repeat with BALLAST_STANDIN_FIRST_SEED=" + std::to_string(seed) + " BALLAST_STANDIN_SEEDS=1");
    const Watchdog watchdog(120);
    const Case c = make_case(seed);
    const Outcome expected = run_case(c, plain_config(directory.path(), Tier::device, Timing::after_backward), {});
    base::Random random(seed * 31);
    auto timing = static_cast<Timing>(1 + random.below(3));
    if (c.clip && timing == Timing::eager) timing = Timing::just_in_time;
    Config config = plain_config(directory.path(), Tier::nvme, timing);
    config.placement.parameters = static_cast<Tier>(random.below(3));
    config.placement.optimizer = static_cast<Tier>(random.below(3));
    config.placement.gradients = static_cast<Tier>(random.below(2));
    config.placement.automatic = random.below(4) == 0;
    expect_same(run_on_device(c, config, seed), expected);
    if (HasFailure()) return;
  }
}

// Two steps of a small model, as a program would run them. Returns how often `function` was called before the end, when
// there is nobody left to tell.
std::uint64_t train_briefly(const std::string& directory, Tier tier, const std::string& function) {
  Config config = plain_config(directory, tier, Timing::just_in_time);
  SyntheticOptions options;
  on_device(options);
  Engine engine(config, cuda_environment());
  SyntheticTrainer trainer(engine, testing::small_model(2), options);
  engine.commit();
  trainer.initialize();
  for (int step = 0; step < 2; ++step) trainer.step();
  // After this the engine may still read ahead, for steps that never come.
  const std::uint64_t calls = standin::calls(function);
  trainer.values();
  return calls;
}

TEST(StandInEngine, EachCallMayFailAndTheErrorSaysWhichAndNothingStays) {
  const TemporaryDirectory directory;
  std::size_t failures = 0;
  for (Tier tier : {Tier::device, Tier::nvme}) {
    for (const char* function :
         {"cudaGetDeviceCount", "cudaMalloc", "cudaHostRegister", "cudaHostAlloc", "cudaStreamCreateWithPriority",
          "cudaEventCreateWithFlags", "cudaMemGetInfo", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaEventRecord",
          "cudaEventSynchronize", "cudaStreamSynchronize", "cuStreamWaitValue32", "launch", "execution"}) {
      // Streams that are not ordered run into one another until the failure is seen: a race on purpose.
      const std::string name = function;
      const bool orders = name == "cudaEventRecord" || name == "cuStreamWaitValue32" || name == "cudaStreamWaitEvent";
      if (orders && testing::kUnderThreadSanitizer) continue;
      standin::reset();
      train_briefly(directory.path(), tier, function);
      const std::uint64_t calls = standin::calls(function);
      for (int part = 0; part < 4 && calls > 0; ++part) {
        const std::uint64_t nth = 1 + (calls - 1) * static_cast<std::uint64_t>(part) / 3;
        if (part > 0 && calls < 4) break;
        for (const cudaError_t error : {cudaErrorIllegalAddress, cudaErrorMemoryAllocation}) {
          if (error == cudaErrorMemoryAllocation && std::string(function) == "execution") continue;
          const Watchdog watchdog(60);
          SCOPED_TRACE(std::string(function) + " fails, call " + std::to_string(nth) + " of " + std::to_string(calls) +
                       ", tier " + std::string(to_string(tier)));
          standin::reset();
          standin::fail(function, nth, error);
          std::uint64_t calls_seen = 0;  // how many there are may vary a little with the timing
          try {
            calls_seen = train_briefly(directory.path(), tier, function);
          } catch (const Error& failure) {
            EXPECT_THAT(failure.what(), HasSubstr("cudaError")) << "the native name is missing";
            calls_seen = 0;
          }
          EXPECT_LT(calls_seen, nth) << "nothing was thrown";
          EXPECT_EQ(standin::live().total(), 0u);
          ++failures;
        }
      }
    }
  }
  EXPECT_GT(failures, 60u);
}

TEST(StandInEngine, TheConfigurationPicksTheDevice) {
  const TemporaryDirectory directory;
  standin::reset();
  cuda::register_device();
  Config config = plain_config(directory.path(), Tier::device, Timing::after_backward);
  for (const char* name : {"cuda", "auto"}) {
    config.device = name;
    cudaStream_t own = nullptr;
    ASSERT_EQ(cudaStreamCreateWithPriority(&own, cudaStreamNonBlocking, 0), cudaSuccess);
    {
      Engine engine(config);
      engine.add_unit("u", {{"w", {100}}});
      engine.commit();
      EXPECT_EQ(engine.report().device, "cuda");
      EXPECT_EQ(engine.adopt_stream(own, "trainer").native_handle(), own);
    }
    ASSERT_EQ(cudaStreamDestroy(own), cudaSuccess);
  }
  standin::configure({.devices = 0});
  EXPECT_EQ(
      [&] {
        Engine engine(config);
        engine.add_unit("u", {{"w", {100}}});
        engine.commit();
        return engine.report().device;
      }(),
      "host");
  config.device = "cuda";
  EXPECT_THROW(Engine engine(config), ConfigError);
}

TEST(StandInEngine, ABudgetBeyondTheDeviceIsRefusedWithTheNumbers) {
  const TemporaryDirectory directory;
  standin::reset();
  standin::configure({.device_bytes = std::size_t{1} << 18});
  try {
    train_briefly(directory.path(), Tier::device, "cudaMalloc");
    FAIL() << "nothing was thrown";
  } catch (const PlanError& error) {
    EXPECT_THAT(error.what(), ::testing::AllOf(HasSubstr("262144 bytes"), HasSubstr("budget.device")));
  }
  EXPECT_EQ(standin::live().total(), 0u);
}

}  // namespace
}  // namespace ballast
