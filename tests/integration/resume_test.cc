// A run that is saved, and gone on from, is the run that was never stopped: every byte of what both save at the end, in
// every pair of tiers, with everything on that has a state of its own; and what a resume may change and what not.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/engine/checkpoint.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "support/durable_runs.h"

namespace ballast::testing {
namespace {

using ::testing::HasSubstr;

// All that a checkpoint holds of the numbers: values, moments and step count of each parameter, the loss scale.
struct Saved {
  std::vector<float> states;
  std::vector<std::uint64_t> counts;
  double loss_scale = 0;
  std::uint64_t step = 0;
  std::string settings;

  explicit Saved(const std::string& folder) {
    CheckpointReader reader({folder});
    for (std::size_t i = 0; i < reader.parameters().size(); ++i) {
      const auto count = static_cast<std::size_t>(reader.parameters()[i].elements);
      const std::size_t at = states.size();
      states.resize(at + 3 * count);
      const std::span<float> out(states.data() + at, 3 * count);
      reader.read(i, 0, out.first(count));
      reader.read_moments(i, 0, out.subspan(count, count), out.last(count));
      counts.push_back(reader.parameters()[i].step_count);
    }
    loss_scale = reader.loss_scale();
    step = reader.step();
    settings = reader.settings();
  }
};

void expect_same(const Saved& a, const Saved& b) {
  ASSERT_EQ(a.states.size(), b.states.size());
  EXPECT_EQ(std::memcmp(a.states.data(), b.states.data(), a.states.size() * 4), 0);
  EXPECT_EQ(a.counts, b.counts);
  EXPECT_EQ(a.loss_scale, b.loss_scale);
  EXPECT_EQ(a.step, b.step);
  EXPECT_EQ(a.settings, b.settings);
}

class Resume : public ::testing::Test {
 protected:
  const Watchdog watchdog_{300};
  const TemporaryDirectory directory_;
  const std::string path_ = directory_.path();
};

// Clipping, a dynamic loss scale that has halved before and halves again after, warm-up, accumulation, a parameter that
// is absent now and then.
TEST_F(Resume, TenStepsAreFiveAndFiveInEveryPairOfTiers) {
  const std::vector<SyntheticUnit> model = small_model(3);
  Course course;
  course.synthetic.micro_batches = 2;
  course.synthetic.rate = [](int step) { return 0.002 * (step + 1); };
  course.synthetic.poison = [](int step) { return step == 2 || step == 6; };
  course.synthetic.absent = [](int step, int, ParameterId id) {
    return step % 3 == 1 && id.unit == 1 && id.index == 1;
  };
  const auto config_of = [&](Tier parameters, Tier optimizer) {
    Config config = plain_config(path_ + "/run", parameters, Timing::just_in_time);
    config.placement.optimizer = optimizer;
    config.optimizer.clip_global_norm = 0.05;
    config.loss_scale.kind = Config::LossScale::Kind::dynamic;
    return config;
  };
  course.steps = 10;
  course.save_to = path_ + "/whole/step-10";
  run(config_of(Tier::host, Tier::host), model, course);
  const Saved whole(course.save_to);
  EXPECT_EQ(whole.step, 8U);
  EXPECT_LT(whole.loss_scale, 65536.0);
  for (const Tier parameters : {Tier::device, Tier::host, Tier::nvme}) {
    for (const Tier optimizer : {Tier::device, Tier::host, Tier::nvme}) {
      SCOPED_TRACE(std::string(to_string(parameters)) + " " + std::string(to_string(optimizer)));
      const std::string half = path_ + "/half", next = path_ + "/next";
      course.steps = 5;
      course.save_to = half + "/step-5";
      course.options = {};
      run(config_of(parameters, optimizer), model, course);
      course.steps = 10;
      course.save_to = next + "/step-10";
      course.options = {ExistingRun::resume, half};
      const Outcome second = run(config_of(parameters, optimizer), model, course);
      EXPECT_EQ(second.resumed_from, half + "/step-5");
      EXPECT_EQ(second.losses.size(), 5U);
      expect_same(Saved(course.save_to), whole);
      std::filesystem::remove_all(half);
      std::filesystem::remove_all(next);
    }
  }
}

TEST_F(Resume, WhatLeavesTheNumbersAloneMayChangeAndWhatDoesNotIsRefusedByName) {
  const std::vector<SyntheticUnit> model = small_model(3);
  const Config config = plain_config(path_ + "/run", Tier::host, Timing::just_in_time);
  const Outcome whole = run(config, model, {.steps = 4});
  Course half;
  half.steps = 2;
  half.save_to = path_ + "/half/step-2";
  run(config, model, half);
  const auto go_on = [&](const std::function<void(Config&)>& change) {
    Config other = plain_config(path_ + "/other", Tier::nvme, Timing::after_backward);
    change(other);
    Course course;
    course.options = {ExistingRun::resume, path_ + "/half"};
    return run(other, model, course);
  };
  for (const auto& change : std::vector<std::function<void(Config&)>>{
           [](Config& c) { c.threads = 3; }, [](Config& c) { c.nvme.block_bytes = 16 << 10; },
           [](Config& c) { c.nvme.queue_depth = 1; }, [](Config& c) { c.nvme.backend = "threads"; },
           [](Config& c) { c.budget.host_bytes = std::uint64_t{3} << 20; },
           [](Config& c) { c.optimizer.timing = Timing::eager; }, [](Config& c) { c.zero_stage = 1; },
           [](Config& c) { c.durability.every_steps = 1; }}) {
    const Outcome next = go_on(change);
    EXPECT_EQ(next.resumed_at, 2U);
    EXPECT_EQ(next.values, whole.values);
    EXPECT_EQ(next.losses, std::vector<double>(whole.losses.begin() + 2, whole.losses.end()));
    std::filesystem::remove_all(path_ + "/other");
  }
  const auto refused = [&](const std::string& key, const std::function<void(Config&)>& change) {
    EXPECT_THAT(text_of<ConfigError>([&] { go_on(change); }), HasSubstr(key));
  };
  refused("optimizer.type (\"adamw\" there, \"adam\" here)", [](Config& c) { c.optimizer.type = "adam"; });
  refused("optimizer.betas.1", [](Config& c) { c.optimizer.beta2 = 0.9; });
  refused("optimizer.epsilon", [](Config& c) { c.optimizer.epsilon = 1e-6; });
  refused("optimizer.weight_decay", [](Config& c) { c.optimizer.weight_decay = 0.2; });
  refused("optimizer.clip_global_norm", [](Config& c) { c.optimizer.clip_global_norm = 2.0; });
  refused("loss_scale", [](Config& c) { c.loss_scale.kind = Config::LossScale::Kind::dynamic; });
  refused("precision.moments", [](Config& c) { c.precision.moments = MomentType::bf16; });
  refused("precision.moments", [](Config& c) { c.precision.moments = MomentType::int8; });
  refused("precision.gradients", [](Config& c) { c.precision.gradients = DataType::bf16; });
  refused("bf16", [](Config& c) { c.precision.parameters = DataType::fp32; });
}

}  // namespace
}  // namespace ballast::testing
