// The trainer on a real engine: the same numbers as the maths alone, the same bytes for a step whatever ran before, and
// what happens to steps whose gradients are not finite.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "gpt/trainer.h"
#include "unit/gpt_reference.h"

namespace ballast::gpt {
namespace {

const GptShape kShape{2, 32, 4, 24, 256, true};

std::string text_path() {
  static const std::string path = [] {
    const std::string name =
        (std::filesystem::temp_directory_path() / ("ballast-gpt-text-" + std::to_string(getpid()))).string();
    std::ofstream out(name, std::ios::binary);
    for (int i = 0; i < 40; ++i) out << "the quick brown fox jumps over the lazy dog number " << i % 10 << "; ";
    return name;
  }();
  return path;
}
class TextFile : public ::testing::Environment {
 public:
  void TearDown() override { std::filesystem::remove(text_path()); }
};
const auto* const kTextFile = ::testing::AddGlobalTestEnvironment(new TextFile);

Config config_of(const std::string& more = "") {
  return Config::from_json(R"({"device": "host", "budget": {"device": "64MiB", "host": "64MiB"},
    "placement": {"parameters": "host", "gradients": "host", "optimizer": "host"}, "threads": 1)" +
                           more + "}");
}

TrainSettings settings_of(std::int64_t micro_batches = 1, MicroBatchOrder order = MicroBatchOrder::horizontal) {
  TrainSettings settings;
  settings.batch = 6;
  settings.sequence = 20;
  settings.micro_batches = micro_batches;
  settings.order = order;
  settings.seed = 5;
  settings.threads = 2;
  return settings;
}

// An engine and its trainer, ready for the first step.
struct Session {
  explicit Session(const Config& config, const TrainSettings& settings = settings_of(), const GptShape& shape = kShape)
      : engine(config), trainer(engine, shape, settings, TokenData::open(text_path())) {
    engine.commit();
    engine.initialize(trainer.fill());
  }
  std::vector<double> losses(int steps) {
    std::vector<double> result;
    for (int i = 0; i < steps; ++i) result.push_back(trainer.step(static_cast<std::uint64_t>(i), 1e-3).loss);
    return result;
  }
  Engine engine;
  GptTrainer trainer;
};

TEST(GptTrainer, LossAndNormOfAStepAreThoseOfTheMathsAlone) {
  for (const bool tied : {true, false}) {
    GptShape shape = kShape;
    shape.tie_embeddings = tied;
    const TrainSettings settings = settings_of();
    Session session(config_of(), settings, shape);
    const StepResult result = session.trainer.step(3);

    testing::MemoryModel model(shape, DataType::bf16, DataType::fp32, 1);
    const auto fill = session.trainer.fill();
    for (std::uint32_t u = 0; u < model.units().size(); ++u) {
      for (std::uint32_t i = 0; i < model.units()[u].size(); ++i) {
        fill({u, i}, 0, model.units()[u][i].master);
        // The engine's bf16 is the one its fp32 master is rebuilt from: ties away from zero.
        auto& p = model.units()[u][i];
        for (std::size_t e = 0; e < p.master.size(); ++e) {
          std::uint32_t bits;
          std::memcpy(&bits, &p.master[e], 4);
          const auto half = static_cast<std::uint16_t>((bits + 0x8000) >> 16);
          std::memcpy(p.bytes.data() + 2 * e, &half, 2);
        }
      }
    }
    MathOptions options;
    options.sequences = settings.batch;
    options.sequence = settings.sequence;
    options.threads = 1;
    const auto math = GptMath::create(shape, options);
    const auto data = TokenData::open(text_path());
    const std::uint64_t seed = base::random_at(settings.seed, 0x747261696E);
    for (std::int64_t s = 0; s < settings.batch; ++s) {
      std::vector<std::uint32_t> bytes(static_cast<std::size_t>(settings.sequence) + 1);
      data->read(data->sequence_offset(seed, 3, static_cast<std::uint64_t>(s), settings.sequence), bytes,
                 shape.vocabulary);
      std::copy_n(bytes.begin(), settings.sequence, math->tokens(0).begin() + s * settings.sequence);
      std::copy_n(bytes.begin() + 1, settings.sequence, math->targets(0).begin() + s * settings.sequence);
    }
    EXPECT_EQ(result.loss, model.run(*math, 1)) << "tied " << tied;
    double square = 0;
    for (const float g : model.all_gradients()) square += static_cast<double>(g) * g;
    EXPECT_NEAR(result.grad_norm, std::sqrt(square), 1e-6 * std::sqrt(square)) << "tied " << tied;
    EXPECT_TRUE(result.updated);
  }
}

TEST(GptTrainer, LearnsARepeatingText) {
  Session session(config_of());
  const std::vector<double> losses = session.losses(150);
  EXPECT_NEAR(losses.front(), std::log(256.0), 0.2);
  EXPECT_LT(losses.back(), 1.5);
}

TEST(GptTrainer, LossesAreTheSameBitsForAnyPlacementTimingAndThreads) {
  const std::vector<double> expected = Session(config_of()).losses(6);
  const char* changes[] = {
      R"(, "optimizer": {"timing": "after_backward"})",
      R"(, "optimizer": {"timing": "just_in_time"})",
  };
  for (const char* change : changes) EXPECT_EQ(Session(config_of(change)).losses(6), expected) << change;
  Config device = config_of();
  device.placement.parameters = device.placement.gradients = device.placement.optimizer = Tier::device;
  EXPECT_EQ(Session(device).losses(6), expected);
  for (const int threads : {1, 3}) {
    TrainSettings settings = settings_of();
    settings.threads = threads;
    EXPECT_EQ(Session(config_of(), settings).losses(6), expected) << threads;
  }
}

TEST(GptTrainer, MicroBatchesCutTheSameBatchInEitherOrder) {
  for (const bool tied : {true, false}) {
    GptShape shape = kShape;
    shape.tie_embeddings = tied;
    const std::vector<double> whole = Session(config_of(), settings_of(), shape).losses(5);
    const std::vector<double> horizontal = Session(config_of(), settings_of(3), shape).losses(5);
    const std::vector<double> vertical =
        Session(config_of(), settings_of(3, MicroBatchOrder::vertical), shape).losses(5);
    EXPECT_NEAR(horizontal[0], whole[0], 1e-5);  // rounding aside the same mean
    EXPECT_EQ(vertical[0], horizontal[0]);
    for (std::size_t i = 1; i < whole.size(); ++i) {
      EXPECT_NEAR(horizontal[i], whole[i], 0.02) << "step " << i;
      EXPECT_NEAR(vertical[i], whole[i], 0.02) << "step " << i;
    }
  }
}

TEST(GptTrainer, EagerTimingTakesMicroBatchesInEitherOrder) {
  const char* eager = R"(, "optimizer": {"timing": "eager", "clip_global_norm": null})";
  const char* later = R"(, "optimizer": {"timing": "after_backward", "clip_global_norm": null})";
  for (const MicroBatchOrder order : {MicroBatchOrder::horizontal, MicroBatchOrder::vertical}) {
    EXPECT_EQ(Session(config_of(eager), settings_of(3, order)).losses(5),
              Session(config_of(later), settings_of(3, order)).losses(5));
  }
}

TEST(GptTrainer, AStepSeesTheSameBytesWhateverRanBefore) {
  Session plain(config_of()), evaluated(config_of());
  for (std::uint64_t i = 0; i < 4; ++i) {
    const double before = evaluated.trainer.evaluate(i);
    EXPECT_EQ(evaluated.trainer.evaluate(i), before);
    EXPECT_EQ(evaluated.trainer.step(i, 1e-3).loss, plain.trainer.step(i, 1e-3).loss) << "step " << i;
    EXPECT_LT(std::abs(evaluated.trainer.evaluate(i) - before), 2.0);
    EXPECT_NE(evaluated.trainer.evaluate(i), before);  // it sees the update
  }
  Session later(config_of());
  const double ninth = later.trainer.step(9, 0.0).loss;
  Session again(config_of());
  again.trainer.step(4, 0.0);
  EXPECT_EQ(again.trainer.step(9, 0.0).loss, ninth);  // rate 0: no decay either, so the parameters stand still
}

TEST(GptTrainer, RanksShareABatchByRows) {
  const double whole = Session(config_of()).trainer.step(0).loss;
  double sum = 0;
  for (int rank = 0; rank < 3; ++rank) {
    TrainSettings settings = settings_of();
    settings.world_size = 3;
    settings.rank = rank;
    sum += Session(config_of(), settings).trainer.step(0).loss;
  }
  EXPECT_NEAR(sum / 3, whole, 1e-5);
}

TEST(GptTrainer, SeedsDecideParametersAndBatches) {
  TrainSettings other = settings_of();
  other.seed = 6;
  EXPECT_NE(Session(config_of(), other).trainer.step(0).loss, Session(config_of()).trainer.step(0).loss);
}

TEST(GptTrainer, AStepWithoutFiniteGradientsIsDiscardedAndAFewInARowAreAnError) {
  // The gradient of a single token, scaled to the end of fp32's range, overflows.
  TrainSettings settings = settings_of();
  settings.batch = settings.sequence = 1;
  Session session(config_of(R"(, "loss_scale": 3e38)"), settings);
  const double first = session.trainer.evaluate(0);
  for (int i = 0; i < GptTrainer::kDiscardsMax - 1; ++i) {
    const StepResult result = session.trainer.step(static_cast<std::uint64_t>(i));
    EXPECT_FALSE(result.updated);
    EXPECT_FALSE(std::isfinite(result.grad_norm));
    EXPECT_TRUE(std::isfinite(result.loss));
    EXPECT_EQ(session.trainer.evaluate(0), first);
  }
  try {
    session.trainer.step(99);
    ADD_FAILURE() << "discards went on for ever";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::AllOf(::testing::HasSubstr("step 99"), ::testing::HasSubstr("not finite"),
                                               ::testing::HasSubstr("loss scale")));
  }
}

TEST(GptTrainer, ADynamicLossScaleFindsItsValueAndFp16Learns) {
  Session session(config_of(R"(, "loss_scale": "dynamic", "precision": {"parameters": "fp16"})"));
  int updated = 0;
  double loss = 0;
  for (int i = 0; i < 60; ++i) {
    const StepResult result = session.trainer.step(static_cast<std::uint64_t>(i), 1e-3);
    updated += result.updated ? 1 : 0;
    loss = result.loss;
  }
  EXPECT_GT(updated, 40);
  EXPECT_LT(loss, 3.5);
}

TEST(GptTrainer, OtherPrecisionsStartFromTheSameLoss) {
  const double bf16 = Session(config_of()).trainer.step(0).loss;
  for (const char* precision : {R"({"parameters": "fp32"})", R"({"parameters": "fp16"})", R"({"gradients": "bf16"})",
                                R"({"parameters": "fp32", "gradients": "bf16"})"}) {
    Session session(config_of(std::string(R"(, "precision": )") + precision));
    const std::vector<double> losses = session.losses(40);
    EXPECT_NEAR(losses[0], bf16, 0.01) << precision;
    EXPECT_LT(losses.back(), 4.0) << precision;
  }
}

TEST(GptTrainer, ATextTooShortForASequenceIsRefusedBeforeAnythingIsRegistered) {
  Engine engine(config_of());
  TrainSettings settings = settings_of();
  settings.sequence = 4000;
  GptShape shape = kShape;
  shape.context = 8000;
  try {
    const GptTrainer trainer(engine, shape, settings, TokenData::open(text_path()));
    ADD_FAILURE() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), ::testing::AllOf(::testing::HasSubstr(text_path()), ::testing::HasSubstr("4000")));
  }
  shape.vocabulary = 200;
  EXPECT_THROW(GptTrainer(engine, shape, settings_of(), TokenData::open(text_path())), ConfigError);
}

}  // namespace
}  // namespace ballast::gpt
