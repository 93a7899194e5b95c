// What finish_backward takes of other engines: tensor-parallel slices, each with an engine of its own over its
// data-parallel group. SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/engine_support.h"
#include "support/on_ranks.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using testing::on_ranks;
using testing::plain_config;
using testing::TemporaryDirectory;
using testing::Watchdog;

constexpr std::int64_t kWeight = 9000;  // elements of both slices together
constexpr std::int64_t kScale = 130;    // replicated

float initial(std::int64_t element) { return 0.001f * static_cast<float>(element % 101) - 0.05f; }
float gradient(std::int64_t element, int step, int data_rank) {
  return 0.01f * static_cast<float>((element * 7 + step * 5 + data_rank * 3) % 23 - 9);
}

struct Trained {
  std::vector<double> norms;
  std::vector<float> weight, scale;
};

// Trains a unit of a weight, of which this engine has `count` elements from `first` on, and a scale.
Trained train(Engine& engine, std::int64_t first, std::int64_t count, bool counts_scale, int data_rank,
              const AddOthers& add_others) {
  const UnitId unit = engine.add_unit("block", {{"weight", {count}}, {"scale", {kScale}, {.in_norm = counts_scale}}});
  const ParameterId weight = engine.parameter(unit, "weight"), scale = engine.parameter(unit, "scale");
  engine.commit();
  engine.initialize([&](ParameterId id, std::int64_t at, std::span<float> values) {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = initial(at + static_cast<std::int64_t>(i) + (id == weight ? first : 0));
  });
  Trained run;
  Stream stream = engine.stream();
  for (int s = 0; s < 4; ++s) {
    auto step = engine.begin_step();
    {
      auto pass = step.begin_pass();
      auto parameters = engine.acquire(unit, stream);
      auto gradients = engine.gradients(unit, stream);
      const Tensor w = gradients[weight], c = gradients[scale];
      stream.enqueue([=] {
        for (std::int64_t i = 0; i < w.elements; ++i)
          static_cast<float*>(w.data)[i] = gradient(first + i, s, data_rank);
        for (std::int64_t i = 0; i < c.elements; ++i) static_cast<float*>(c.data)[i] = gradient(i, s, data_rank);
      });
      gradients.commit(stream);
      parameters.release(stream);
    }
    run.norms.push_back(step.finish_backward(add_others).value);
    step.update();
  }
  run.weight.resize(static_cast<std::size_t>(count));
  run.scale.resize(kScale);
  engine.read(weight, 0, run.weight);
  engine.read(scale, 0, run.scale);
  return run;
}

AddOthers adding_over(const std::shared_ptr<Communicator>& communicator) {
  return [communicator](GradientTotal& total) {
    double values[2] = {total.norm_squared, total.finite ? 0.0 : 1.0};
    communicator->all_reduce_sum(values);
    total = {values[0], values[1] == 0};
  };
}

Config clipping_config(const std::string& directory, Tier tier, int stage) {
  Config config = plain_config(directory, tier, Timing::just_in_time);
  config.zero_stage = stage;
  config.optimizer.learning_rate = 0.01;
  config.optimizer.clip_global_norm = 0.5;
  return config;
}

TEST(OtherEnginesTest, TensorParallelSlicesHaveTheNumbersOfTheWholeAndReplicatedParametersCountOnce) {
  const Watchdog watchdog(100);
  const TemporaryDirectory directory;
  std::vector<Trained> whole(2);
  on_ranks(2, [&](int rank, const std::shared_ptr<Communicator>& data) {
    EngineEnvironment environment;
    environment.communicator = data;
    Engine engine(clipping_config(directory.path(), Tier::device, 0), environment);
    whole[static_cast<std::size_t>(rank)] = train(engine, 0, kWeight, true, rank, {});
  });
  for (std::size_t s = 0; s < 4; ++s) {  // by hand
    double sum = 0;
    const auto add = [&](std::int64_t elements) {
      for (std::int64_t i = 0; i < elements; ++i) {
        const double mean = (gradient(i, static_cast<int>(s), 0) + gradient(i, static_cast<int>(s), 1)) / 2;
        sum += mean * mean;
      }
    };
    add(kWeight);
    add(kScale);
    EXPECT_NEAR(whole[0].norms[s], std::sqrt(sum), 1e-6 * std::sqrt(sum));
    EXPECT_GT(whole[0].norms[s], 0.5);  // it is clipped
  }
  for (int stage : {0, 1, 3}) {
    for (Tier tier : {Tier::host, Tier::nvme}) {
      SCOPED_TRACE("stage " + std::to_string(stage));
      on_ranks(4, [&](int rank, const std::shared_ptr<Communicator>& world) {
        const int slice = rank % 2;
        EngineEnvironment environment;
        environment.communicator = world->split(slice);
        const auto slices = world->split(rank / 2);
        Engine engine(clipping_config(directory.path() + "/slice" + std::to_string(slice), tier, stage), environment);
        constexpr std::int64_t kPart = kWeight / 2;
        const Trained run = train(engine, slice * kPart, kPart, slice == 0, rank / 2, adding_over(slices));
        for (std::size_t s = 0; s < 4; ++s) EXPECT_NEAR(run.norms[s], whole[0].norms[s], 1e-12);
        for (std::size_t i = 0; i < run.weight.size(); ++i)
          ASSERT_NEAR(run.weight[i], whole[0].weight[static_cast<std::size_t>(slice * kPart) + i], 1e-6);
        for (std::size_t i = 0; i < run.scale.size(); ++i) ASSERT_NEAR(run.scale[i], whole[0].scale[i], 1e-6);
      });
    }
  }
}

// One step of an engine with one unit whose gradients are `value` everywhere.
GradientNorm one_step(Engine& engine, float value, const AddOthers& add_others, double* scale = nullptr) {
  const std::vector<ParameterSpec> parameters = {{"w", {100}}};
  const UnitId unit = engine.add_unit("u", parameters);
  engine.commit();
  engine.initialize(
      [](ParameterId, std::int64_t, std::span<float> values) { std::fill(values.begin(), values.end(), 1.0f); });
  auto step = engine.begin_step();
  {
    auto pass = step.begin_pass();
    testing::contribute(engine, unit, parameters, [&](std::uint32_t) { return value; });
  }
  const GradientNorm norm = step.finish_backward(add_others);
  if (norm.finite) {
    step.update();
  } else {
    EXPECT_THROW(step.update(), UsageError);
    step.discard();
  }
  if (scale != nullptr) *scale = engine.begin_step().loss_scale();
  return norm;
}

TEST(OtherEnginesTest, AnOverflowInOneEngineSkipsTheStepInAll) {
  const Watchdog watchdog(100);
  const TemporaryDirectory directory;
  on_ranks(4, [&](int rank, const std::shared_ptr<Communicator>& world) {
    const int slice = rank % 2;
    Config config = plain_config(directory.path(), Tier::host, Timing::just_in_time);
    config.loss_scale.kind = Config::LossScale::Kind::dynamic;
    EngineEnvironment environment;
    environment.communicator = world->split(slice);
    Engine engine(config, environment);
    double scale = 0;
    const GradientNorm norm =
        one_step(engine, rank == 1 ? INFINITY : 1.0f, adding_over(world->split(rank / 2)), &scale);
    EXPECT_FALSE(norm.finite);
    EXPECT_FALSE(std::isfinite(norm.value));
    EXPECT_EQ(norm.non_finite_parameter, slice == 1 ? "u/w" : "");
    EXPECT_EQ(scale, config.loss_scale.value / 2);
    EXPECT_EQ(engine.step_count({0, 0}), 0u);
  });
}

TEST(OtherEnginesTest, AnEngineOfOneRankTakesWhatOthersHaveToo) {
  const Watchdog watchdog(100);
  const TemporaryDirectory directory;
  const Config config = plain_config(directory.path(), Tier::host, Timing::just_in_time);
  int calls = 0;
  Engine engine(config);
  const GradientNorm norm = one_step(engine, 2.0f, [&](GradientTotal& total) {
    ++calls;
    EXPECT_NEAR(total.norm_squared, 400, 1e-9);
    EXPECT_TRUE(total.finite);
    total.norm_squared += 500;
  });
  EXPECT_EQ(calls, 1);
  EXPECT_NEAR(norm.value, 30, 1e-12);
  for (double told : {-1.0, static_cast<double>(NAN)}) {
    Engine other(config);
    const auto tell = [&](GradientTotal& total) { total.norm_squared = told; };
    if (told < 0) {
      EXPECT_THROW(one_step(other, 2.0f, tell), UsageError);
    } else {
      EXPECT_FALSE(one_step(other, 2.0f, tell).finite);
    }
  }
}

// What each of two ranks says.
std::vector<std::string> refusals(const std::function<AddOthers(int rank)>& add_others) {
  const TemporaryDirectory directory;
  std::vector<std::string> texts(2);
  on_ranks(2, [&](int rank, const std::shared_ptr<Communicator>& world) {
    EngineEnvironment environment;
    environment.communicator = world;
    try {
      Engine engine(plain_config(directory.path(), Tier::host, Timing::just_in_time), environment);
      one_step(engine, 1.0f, add_others(rank));
    } catch (const std::exception& error) {
      texts[static_cast<std::size_t>(rank)] = error.what();
    }
  });
  return texts;
}

TEST(OtherEnginesTest, RanksThatDoNotComeToOneTotalAreRefused) {
  const Watchdog watchdog(100);
  for (const std::string& text :
       refusals([](int rank) { return rank == 0 ? AddOthers([](GradientTotal&) {}) : AddOthers(); })) {
    EXPECT_THAT(text, HasSubstr("on 1 of 2 ranks"));
  }
  for (const std::string& text :
       refusals([](int rank) { return AddOthers([rank](GradientTotal& total) { total.norm_squared += rank; }); })) {
    EXPECT_THAT(text, HasSubstr("on rank 1 and"));
  }
  const std::vector<std::string> texts = refusals([](int rank) {
    return AddOthers([rank](GradientTotal&) {
      if (rank == 1) throw std::runtime_error("the trainer's own trouble");
    });
  });
  for (const std::string& text : texts) EXPECT_THAT(text, HasSubstr("the trainer's own trouble"));
}

}  // namespace
}  // namespace ballast
