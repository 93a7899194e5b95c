// The GPT over several ranks: losses of a global batch, whoever computes which part of it.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "gpt/trainer.h"
#include "support/engine_support.h"
#include "support/on_ranks.h"

namespace ballast::gpt {
namespace {

using ballast::testing::on_ranks;
using ballast::testing::plain_config;
using ballast::testing::TemporaryDirectory;
using ballast::testing::Watchdog;

constexpr int kSteps = 8;
constexpr std::int64_t kBatch = 12;

GptShape small_shape(bool tied) {
  GptShape shape;
  shape.layers = 2;
  shape.width = 48;
  shape.heads = 4;
  shape.context = 32;
  shape.vocabulary = 256;
  shape.tie_embeddings = tied;
  return shape;
}

std::vector<double> losses(int world_size, const Config& config, bool tied, std::int64_t micro_batches,
                           const std::shared_ptr<const TokenData>& data) {
  std::vector<double> result(kSteps, 0);
  on_ranks(world_size, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
    EngineEnvironment environment;
    environment.communicator = communicator;
    Engine engine(config, environment);
    const GptShape shape = small_shape(tied);
    TrainSettings settings;
    settings.batch = kBatch;
    settings.sequence = 16;
    settings.micro_batches = micro_batches;
    settings.world_size = world_size;
    settings.rank = rank;
    settings.threads = 1;
    GptTrainer trainer(engine, shape, settings, data);
    engine.commit();
    engine.initialize(trainer.fill());
    for (int step = 0; step < kSteps; ++step) {
      double loss = trainer.step(static_cast<std::uint64_t>(step)).loss;
      communicator->all_reduce_sum({&loss, 1});
      if (rank == 0) result[static_cast<std::size_t>(step)] = loss / world_size;
    }
  });
  return result;
}

TEST(GptRanksTest, StagesGiveTheSameBitsAndOneRankNearlyTheSame) {
  const Watchdog watchdog(250);
  const TemporaryDirectory directory;
  const std::string text = directory.path() + "/text";
  {
    std::ofstream out(text, std::ios::binary);
    for (int i = 0; i < 3000; ++i) out << "the " << i * 37 % 101 << "th line of a text that is easy to learn; ";
  }
  const auto data = TokenData::open(text);
  for (const bool tied : {true, false}) {
    for (const DataType type : {DataType::bf16, DataType::fp32}) {
      const double tolerance = type == DataType::fp32 ? 1e-5 : 5e-4;
      Config config = plain_config(directory.path(), Tier::nvme, Timing::just_in_time);
      config.precision.parameters = type;
      config.optimizer.clip_global_norm = 1.0;
      config.threads = 1;
      const std::vector<double> one = losses(1, config, tied, 1, data);
      for (const int world_size : {2, 3, 4}) {
        for (const std::int64_t micro_batches : {1, 3}) {
          if (kBatch % (world_size * micro_batches) != 0) continue;
          std::vector<double> first;
          for (int stage = 0; stage <= 3; ++stage) {
            SCOPED_TRACE("world size " + std::to_string(world_size) + ", stage " + std::to_string(stage) +
                         (tied ? ", tied" : ", not tied"));
            config.zero_stage = stage;
            config.optimizer.timing = stage % 2 == 0 ? Timing::just_in_time : Timing::after_backward;
            const std::vector<double> now = losses(world_size, config, tied, micro_batches, data);
            if (first.empty()) first = now;
            EXPECT_EQ(now, first);
            for (std::size_t step = 0; step < kSteps; ++step) EXPECT_NEAR(now[step], one[step], tolerance * one[step]);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace ballast::gpt
