// Whole steps on the CUDA device over the stand-in: the same numbers, bit for bit, as on the host device, whatever the
// placement, the timing and the order in which streams run.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "gpt/model.h"
#include "support/standin_support.h"

namespace ballast {
namespace {

using testing::Case;
using ::testing::HasSubstr;
using testing::make_case;
using testing::number_from;
using testing::on_device;
using testing::Outcome;
using testing::plain_config;
using testing::run_case;
using testing::TemporaryDirectory;
using testing::Watchdog;

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
  EXPECT_EQ(standin::live().total(), 0u) << to_string(standin::live());
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "left for the trainer to find";
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
    for (int tiers = 0; tiers < 27; ++tiers) {
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
  const std::uint64_t seeds = number_from("BALLAST_STANDIN_SEEDS", 24);
  const std::uint64_t begin = number_from("BALLAST_STANDIN_FIRST_SEED", 1);
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
    config.placement.gradients = static_cast<Tier>(random.below(3));
    config.placement.automatic = random.below(4) == 0;
    if (c.precision.moments == MomentType::int8 && config.placement.optimizer == Tier::device &&
        !config.placement.automatic) {
      config.placement.optimizer = Tier::host;
    }
    expect_same(run_on_device(c, config, seed), expected);
    if (HasFailure()) return;
  }
}

TEST(StandInEngine, TheTrainersOwnStreamGivesTheSameNumbers) {
  const Watchdog watchdog(100);
  const TemporaryDirectory directory;
  Case c = gpt_case();
  const Outcome expected = run_case(c, plain_config(directory.path(), Tier::device, Timing::after_backward), {});
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    standin::reset();
    standin::configure({.timing_seed = seed});
    cudaStream_t own = nullptr;
    ASSERT_EQ(cudaStreamCreateWithPriority(&own, cudaStreamNonBlocking, 0), cudaSuccess);
    on_device(c.options);
    Stream adopted;
    c.options.stream = [&](Engine& engine) {
      if (adopted.native_handle() == nullptr) adopted = engine.adopt_stream(own, "trainer");
      return adopted;
    };
    expect_same(run_case(c, plain_config(directory.path(), Tier::nvme, Timing::just_in_time), cuda_environment()),
                expected);
    EXPECT_EQ(standin::live().streams, 1u);  // the trainer's, which stays the trainer's
    ASSERT_EQ(cudaStreamDestroy(own), cudaSuccess);
    EXPECT_EQ(standin::live().total(), 0u) << to_string(standin::live());
  }
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

TEST(StandInEngine, EightBitMomentsAreRefusedOnTheDeviceAndPlacedElsewhereByAuto) {
  const TemporaryDirectory directory;
  standin::reset();
  Case c = gpt_case();
  c.precision.moments = MomentType::int8;
  const Outcome expected = run_case(c, plain_config(directory.path(), Tier::device, Timing::after_backward), {});
  Config config = plain_config(directory.path(), Tier::device, Timing::just_in_time);
  Case on_card = c;
  on_device(on_card.options);
  try {
    run_case(on_card, config, cuda_environment());
    FAIL() << "nothing was thrown";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), ::testing::AllOf(HasSubstr("precision.moments"), HasSubstr("placement.optimizer")));
  }
  config.placement.automatic = true;
  expect_same(run_on_device(c, config, 1), expected);
}

TEST(StandInEngine, ABudgetBeyondTheDeviceIsRefusedWithTheNumbers) {
  const TemporaryDirectory directory;
  standin::reset();
  standin::configure({.device_bytes = std::size_t{1} << 18});
  try {
    Case c = gpt_case();
    on_device(c.options);
    run_case(c, plain_config(directory.path(), Tier::device, Timing::just_in_time), cuda_environment());
    FAIL() << "nothing was thrown";
  } catch (const PlanError& error) {
    EXPECT_THAT(error.what(), ::testing::AllOf(HasSubstr("262144 bytes"), HasSubstr("budget.device")));
  }
  EXPECT_EQ(standin::live().total(), 0u);
}

}  // namespace
}  // namespace ballast
