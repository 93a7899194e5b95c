// Plans: what fits, what the refusals say, and what automatic placement does with more memory.
// SPDX-License-Identifier: Apache-2.0
#include "plan.h"

#include <ballast/base/error.h>
#include <ballast/base/random.h>
#include <gtest/gtest.h>

#include "trace.h"

namespace ballast::engine {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

struct Model {
  std::vector<UnitSpec> units;
  PlanInputs inputs;
};

Model make_model(std::vector<UnitSpec> units) {
  Model model{std::move(units), {}};
  std::vector<bool> trainable;
  for (const UnitSpec& unit : model.units) {
    bool any = false;
    for (const ParameterSpec& parameter : unit.parameters) any |= parameter.options.trainable;
    trainable.push_back(any);
  }
  model.inputs.openings = default_openings(trainable);
  return model;
}

Model uniform(int units, std::int64_t elements) {
  std::vector<UnitSpec> specs;
  for (int u = 0; u < units; ++u) specs.push_back({"u" + std::to_string(u), {{"w", {elements}}, {"b", {100}}}});
  return make_model(specs);
}

Config config_with(std::uint64_t host, std::uint64_t device, bool automatic, Timing timing = Timing::just_in_time) {
  Config config;
  config.budget.host_bytes = host;
  config.budget.device_bytes = device;
  config.placement.automatic = automatic;
  config.optimizer.timing = timing;
  config.optimizer.clip_global_norm.reset();
  return config;
}

std::uint64_t named(const std::string& text, const std::string& key) {
  const auto at = text.find("smallest " + key + ": ");
  EXPECT_NE(at, std::string::npos) << text;
  return at == std::string::npos ? 0 : std::stoull(text.substr(at + key.size() + 11)) * 1024;
}

void check_sums(const Plan& plan, const Config& config) {
  EXPECT_LE(plan.host_bytes, config.budget.host_bytes);
  EXPECT_LE(plan.device_bytes, config.budget.device_bytes);
  std::uint64_t host = 0;
  for (std::size_t c = 0; c < plan.layout.chunks.size(); ++c) {
    const ChunkLayout& chunk = plan.layout.chunks[c];
    const ChunkPlacement& place = plan.placement[c];
    if (place.parameters == Tier::host) host += chunk.parameter_bytes;
    if (place.optimizer == Tier::host) host += chunk.optimizer_bytes();
    std::uint64_t extent = 0;
    if (place.parameters == Tier::nvme) extent += chunk.parameter_bytes;
    if (place.optimizer == Tier::nvme) extent += chunk.optimizer_bytes();
    EXPECT_EQ(place.extent_bytes, extent);
    EXPECT_LE(extent, plan.update_slots > 0 ? plan.update_slot_bytes : 0);
  }
  EXPECT_EQ(plan.host_parameter_bytes + plan.host_optimizer_bytes, host);
  EXPECT_EQ(plan.copy_slots > 0, plan.durable);
  for (const ChunkPlacement& place : plan.placement) {
    EXPECT_LE(plan.durable ? place.stored_bytes : 0, plan.copy_slot_bytes);
  }
}

TEST(PlanTest, TheSmallestBudgetsThatRefusalsNameAreExactForManyModels) {
  for (std::uint64_t seed = 1; seed <= 25; ++seed) {
    base::Random random(seed);
    std::vector<UnitSpec> specs;
    for (std::uint64_t u = 0; u <= random.below(5); ++u) {
      UnitSpec unit{"u" + std::to_string(u), {}};
      for (std::uint64_t p = 0; p <= random.below(4); ++p) {
        unit.parameters.push_back({"p" + std::to_string(p),
                                   {static_cast<std::int64_t>(1 + random.below(3000000))},
                                   {.trainable = random.below(5) > 0}});
      }
      specs.push_back(unit);
    }
    const Model model = make_model(specs);
    for (bool automatic : {false, true}) {
      for (Timing timing : {Timing::eager, Timing::just_in_time}) {
        SCOPED_TRACE("seed " + std::to_string(seed) + (automatic ? " auto " : " nvme ") +
                     std::string(to_string(timing)));
        Config config = config_with(4096, 4096, automatic, timing);
        config.durability.every_steps = seed % 2;
        std::string text;
        try {
          make_plan(model.units, config, model.inputs);
          FAIL() << "4 KiB are not enough";
        } catch (const PlanError& error) {
          text = error.what();
        }
        const std::uint64_t device = named(text, "budget.device");
        config.budget.device_bytes = device;
        std::uint64_t host = 4096;
        try {
          make_plan(model.units, config, model.inputs);
        } catch (const PlanError& error) {
          host = named(error.what(), "budget.host");
        }
        config.budget.host_bytes = host;
        const Plan plan = make_plan(model.units, config, model.inputs);
        check_sums(plan, config);
        if (host > 4096) {
          config.budget.host_bytes = host - 1024;
          EXPECT_THROW(make_plan(model.units, config, model.inputs), PlanError);
          config.budget.host_bytes = host;
        }
        config.budget.device_bytes = device - 1024;
        EXPECT_THROW(make_plan(model.units, config, model.inputs), PlanError);
      }
    }
  }
}

TEST(PlanTest, MoreHostMemoryNeverSavesLessTraffic) {
  const Model model = uniform(60, 700000);
  double before = 0;
  bool between = false;
  for (std::uint64_t host = 200 * kMiB; host < 800 * kMiB; host += 7 * kMiB) {
    Config config = config_with(host, 24 * kMiB, true);
    const Plan plan = make_plan(model.units, config, model.inputs);
    check_sums(plan, config);
    // A chunk may fall out where the chunk size or the slots change; never more than a few.
    EXPECT_GE(plan.resident_fraction, before - 0.05) << host;
    before = std::max(before, plan.resident_fraction);
    between |= plan.resident_fraction > 0.2 && plan.resident_fraction < 0.8;
  }
  EXPECT_TRUE(between);
  EXPECT_EQ(before, 1.0);
}

TEST(PlanTest, WhatIsResidentIsSpreadOverTheWholeModel) {
  const Model model = uniform(60, 700000);
  const Plan plan = make_plan(model.units, config_with(550 * kMiB, 24 * kMiB, true), model.inputs);
  ASSERT_GT(plan.resident_fraction, 0.1);
  ASSERT_LT(plan.resident_fraction, 0.9);
  // Any two neighbouring stretches of the chunks hold about the same share.
  const std::size_t chunks = plan.placement.size();
  double first = 0, second = 0;
  for (std::size_t c = 0; c < chunks; ++c) {
    const ChunkLayout& chunk = plan.layout.chunks[c];
    const double bytes =
        (plan.placement[c].parameters == Tier::host ? static_cast<double>(chunk.parameter_bytes) : 0.0) +
        (plan.placement[c].optimizer == Tier::host ? static_cast<double>(chunk.optimizer_bytes()) : 0.0);
    (c < chunks / 2 ? first : second) += bytes;
  }
  EXPECT_LT(std::abs(first - second) / (first + second), 0.2);
}

TEST(PlanTest, WhatFitsTheDeviceStaysThereAndWhatFitsTheHostTouchesNoDrive) {
  const Model model = uniform(4, 100000);
  Plan plan = make_plan(model.units, config_with(64 * kMiB, 64 * kMiB, true), model.inputs);
  EXPECT_FALSE(plan.uses_nvme);
  EXPECT_EQ(plan.placement[0].parameters, Tier::device);
  plan = make_plan(model.units, config_with(64 * kMiB, 2 * kMiB, true), model.inputs);
  EXPECT_FALSE(plan.uses_nvme);
  EXPECT_EQ(plan.placement[0].parameters, Tier::host);
  plan = make_plan(model.units, config_with(4 * kMiB, 2 * kMiB, true), model.inputs);
  EXPECT_TRUE(plan.uses_nvme);
}

TEST(PlanTest, ThreeThousandMillionElementsAreCountedInFull) {
  const Model model = make_model({{"u", {{"p", {3'000'000'000}}}}});
  std::string text;
  try {
    make_plan(model.units, config_with(kMiB, kMiB, false), model.inputs);
    FAIL() << "a MiB is not enough";
  } catch (const PlanError& error) {
    text = error.what();
  }
  EXPECT_GE(named(text, "budget.device"), 18'000'000'000u) << "bf16 parameters and fp32 gradients";
  const Plan plan = make_plan(model.units, config_with(kMiB << 15, kMiB << 15, false), model.inputs);
  std::uint64_t stored = 0;
  for (const ChunkPlacement& place : plan.placement) stored += place.extent_bytes;
  EXPECT_GE(stored, 36'000'000'000u);
  EXPECT_LT(stored, 36'000'000'000u + 12 * 4096);
  EXPECT_EQ(plan.host_gradient_bytes, plan.layout.units[0].gradient_elements * 4);
}

// 12 bytes of states for each parameter, 2 of them what the device computes with, and 2 more for a bf16 gradient.
TEST(PlanTest, AThousandMillionParametersTakeTwelveBytesEachAndTheirGradients) {
  const Model model = make_model({{"u", {{"p", {1'000'000'000}}}}});
  Config config = config_with(kMiB << 15, kMiB << 15, false);
  config.placement.parameters = config.placement.optimizer = Tier::host;
  config.precision.gradients = DataType::bf16;
  const Plan plan = make_plan(model.units, config, model.inputs);
  const double padding = 2.0 * 4096;
  EXPECT_NEAR(static_cast<double>(plan.host_parameter_bytes + plan.host_optimizer_bytes), 12e9, 6 * padding);
  EXPECT_NEAR(static_cast<double>(plan.host_parameter_bytes), 2e9, padding);
  EXPECT_NEAR(static_cast<double>(plan.host_gradient_bytes), 2e9, padding);
}

TEST(PlanTest, TimingFollowsWhatTheStepNeedsToKnow) {
  const Model model = uniform(2, 5000);
  Config config = config_with(64 * kMiB, 64 * kMiB, false, Timing::automatic);
  EXPECT_EQ(make_plan(model.units, config, model.inputs).timing, Timing::eager);
  config.optimizer.clip_global_norm = 1;
  EXPECT_EQ(make_plan(model.units, config, model.inputs).timing, Timing::just_in_time);
  config.optimizer.clip_global_norm.reset();
  config.loss_scale.kind = Config::LossScale::Kind::dynamic;
  EXPECT_EQ(make_plan(model.units, config, model.inputs).timing, Timing::just_in_time);
}

TEST(PlanTest, EagerUpdatesKeepNoGradientsExceptSums) {
  const Model model = uniform(3, 300000);
  const Plan jit = make_plan(model.units, config_with(64 * kMiB, 64 * kMiB, false), model.inputs);
  EXPECT_GT(jit.host_gradient_bytes, 0u);
  const Plan eager = make_plan(model.units, config_with(64 * kMiB, 64 * kMiB, false, Timing::eager), model.inputs);
  EXPECT_EQ(eager.host_gradient_bytes, 0u);
  PlanInputs two = model.inputs;
  two.micro_batches = 2;
  const Plan sums = make_plan(model.units, config_with(64 * kMiB, 64 * kMiB, false, Timing::eager), two);
  EXPECT_EQ(sums.host_gradient_bytes, jit.host_gradient_bytes);
}

TEST(PlanTest, GradientsGoToNvmeOnlyWhereTheHostCannotHoldThem) {
  const Model model = uniform(20, 1 << 20);
  const auto planned = [&](std::uint64_t host) {
    return make_plan(model.units, config_with(host, 64 * kMiB, true), model.inputs);
  };
  const Plan ample = planned(128 * kMiB);
  EXPECT_FALSE(ample.nvme_gradients);
  EXPECT_GT(ample.host_gradient_bytes, 80 * kMiB);
  const Plan tight = planned(40 * kMiB);
  EXPECT_TRUE(tight.nvme_gradients);
  EXPECT_EQ(tight.host_gradient_bytes, 0u);
  EXPECT_LE(tight.host_bytes, 40 * kMiB);
  std::uint64_t gradients = 0;
  for (std::size_t c = 0; c < tight.placement.size(); ++c) {
    const ChunkPlacement& place = tight.placement[c];
    EXPECT_EQ(place.gradient_extent_bytes, 4 * tight.layout.chunks[c].elements);
    EXPECT_LE(place.extent_bytes + place.gradient_extent_bytes, tight.update_slot_bytes);
    EXPECT_LE(2 * place.gradient_extent_bytes, tight.gradient_slot_bytes);
    gradients += place.gradient_extent_bytes;
  }
  EXPECT_GE(gradients, std::uint64_t{20} * 4 * (1 << 20));
  // Consumed as they come, they are stored nowhere.
  EXPECT_FALSE(
      make_plan(model.units, config_with(40 * kMiB, 64 * kMiB, true, Timing::eager), model.inputs).nvme_gradients);
}

}  // namespace
}  // namespace ballast::engine
