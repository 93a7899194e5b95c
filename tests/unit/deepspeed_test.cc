// DeepSpeed configurations of the kinds that users publish: what each is read as, which are refused, for what reason.
// Expected values are those that DeepSpeed's documentation gives the keys.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/engine/config.h>
#include <ballast/engine/deepspeed.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

namespace ballast {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using Outcome = DeepSpeedLine::Outcome;

std::string path_of(const std::string& name) { return std::string(BALLAST_SOURCE_DIR "/tests/data/deepspeed/") + name; }
Config load(const std::string& name) { return Config::from_file(path_of(name)); }

std::string refusal(const std::function<Config()>& act) {
  try {
    act();
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), Not(HasSubstr("\n")));
    return error.what();
  }
  return "accepted";
}
std::string refusal_of_file(const std::string& name) {
  return refusal([&] { return load(name); });
}
std::string refusal(const std::string& text) {
  return refusal([&] { return Config::from_json(text, "ds.json"); });
}

DeepSpeedLine line_of(const Config& config, const std::string& key) {
  const auto& lines = config.deepspeed->lines;
  const auto found = std::find_if(lines.begin(), lines.end(), [&](const auto& line) { return line.key == key; });
  return found == lines.end() ? DeepSpeedLine{"no line of " + key, "", "", Outcome::mapped} : *found;
}
std::vector<std::string> keys_without_meaning(const Config& config) {
  std::vector<std::string> keys;
  for (const DeepSpeedLine& line : config.deepspeed->lines)
    if (line.outcome == Outcome::without_meaning) keys.push_back(line.key);
  return keys;
}
void expect_placement(const Config& config, Tier parameters, Tier gradients, Tier optimizer) {
  EXPECT_FALSE(config.placement.automatic);
  EXPECT_EQ(config.placement.parameters, parameters);
  EXPECT_EQ(config.placement.gradients, gradients);
  EXPECT_EQ(config.placement.optimizer, optimizer);
}

TEST(DeepSpeed, StageTwoWithTheOptimizerInHostMemory) {
  const Config config = load("zero2_cpu_offload.json");
  EXPECT_EQ(config.zero_stage, 2);
  expect_placement(config, Tier::device, Tier::host, Tier::host);
  EXPECT_EQ(config.precision.parameters, DataType::bf16);
  EXPECT_EQ(config.optimizer.type, "adamw");
  EXPECT_EQ(config.optimizer.learning_rate, 2e-4);
  EXPECT_EQ(config.optimizer.beta1, 0.9);
  EXPECT_EQ(config.optimizer.beta2, 0.98);
  EXPECT_EQ(config.optimizer.epsilon, 1e-6);
  EXPECT_EQ(config.optimizer.weight_decay, 0.05);
  EXPECT_EQ(config.optimizer.clip_global_norm, 0.5);
  EXPECT_EQ(config.loss_scale.kind, Config::LossScale::Kind::none);
  EXPECT_EQ(config.learning_rate_schedule.type, "WarmupLR");
  EXPECT_EQ(config.learning_rate_schedule.warmup_type, "linear");
  EXPECT_EQ(config.learning_rate_schedule.warmup_num_steps, 500u);
  EXPECT_EQ(config.learning_rate_schedule.warmup_max_lr, 2e-4);
  EXPECT_THAT(
      keys_without_meaning(config),
      ElementsAre("steps_per_print", "optimizer.params.torch_adam", "zero_optimization.offload_optimizer.pin_memory",
                  "zero_optimization.allgather_partitions", "zero_optimization.allgather_bucket_size",
                  "zero_optimization.overlap_comm", "zero_optimization.reduce_scatter",
                  "zero_optimization.reduce_bucket_size", "zero_optimization.contiguous_gradients",
                  "zero_optimization.round_robin_gradients", "wall_clock_breakdown"));
  EXPECT_THAT(config.deepspeed->without_meaning(),
              AllOf(HasSubstr("zero2_cpu_offload.json: "), HasSubstr("zero_optimization.overlap_comm"),
                    Not(HasSubstr("gradient_clipping"))));
}

TEST(DeepSpeed, StageThreeOnNvmeHasBothPathsAndTheBlocksOfItsAio) {
  const Config config = load("zero3_nvme.json");
  EXPECT_EQ(config.zero_stage, 3);
  expect_placement(config, Tier::nvme, Tier::host, Tier::nvme);
  EXPECT_THAT(config.nvme.paths, ElementsAre("nvme-of-the-optimizer", "nvme-of-the-parameters"));
  EXPECT_EQ(config.nvme.block_bytes, 262144u);
  EXPECT_EQ(config.nvme.queue_depth, 16u);
  EXPECT_EQ(config.optimizer.type, "adamw") << "DeepSpeed's Adam decouples the decay unless adam_w_mode is false";
  EXPECT_THAT(line_of(config, "optimizer.type").became, HasSubstr("adam_w_mode"));
  EXPECT_EQ(config.learning_rate_schedule.type, "WarmupDecayLR");
  EXPECT_EQ(config.learning_rate_schedule.total_num_steps, 12u);
  EXPECT_EQ(config.learning_rate_schedule.warmup_min_lr, 1e-5);
  EXPECT_EQ(line_of(config, "zero_optimization.offload_param.max_in_cpu").outcome, Outcome::without_meaning);
  EXPECT_EQ(line_of(config, "aio.thread_count").outcome, Outcome::without_meaning);
  EXPECT_EQ(line_of(config, "aio.block_size").became, "nvme.block_size 262144B");
}

TEST(DeepSpeed, ATunerWritesBooleansAndNumbersAsStrings) {
  const Config config = load("tuned_aio.json");
  EXPECT_EQ(config.nvme.queue_depth, 32u);
  EXPECT_EQ(config.nvme.block_bytes, 8388608u);
  EXPECT_EQ(config.precision.parameters, DataType::bf16);
  expect_placement(config, Tier::nvme, Tier::host, Tier::host);
  EXPECT_THAT(config.nvme.paths, ElementsAre("/scratch/swap"));
  EXPECT_EQ(config.optimizer.clip_global_norm, std::nullopt) << "gradient_clipping is 0 by default";
}

TEST(DeepSpeed, TheAutotunersOutputIsReadWithDeepSpeedsDefaults) {
  const Config config = load("autotuner_output.json");
  EXPECT_EQ(config.zero_stage, 1);
  expect_placement(config, Tier::device, Tier::device, Tier::device);
  EXPECT_EQ(config.precision.parameters, DataType::fp16);
  EXPECT_EQ(config.optimizer.learning_rate, 5e-5);
  EXPECT_EQ(config.optimizer.beta2, 0.999);
  EXPECT_EQ(config.optimizer.weight_decay, 0);
  EXPECT_EQ(config.loss_scale.kind, Config::LossScale::Kind::dynamic);
  EXPECT_EQ(config.loss_scale.value, 4096);
  EXPECT_EQ(config.loss_scale.growth_steps, 1000u);
  EXPECT_EQ(config.loss_scale.hysteresis, 2u);
  EXPECT_EQ(config.loss_scale.minimum, 1);
  EXPECT_EQ(line_of(config, "autotuning").outcome, Outcome::without_meaning);
}

TEST(DeepSpeed, AutoIsAsNotGiven) {
  const Config config = load("hugging_face_auto.json");
  EXPECT_EQ(config.zero_stage, 3);
  expect_placement(config, Tier::device, Tier::device, Tier::device);
  EXPECT_EQ(config.precision.parameters, DataType::fp32) << "neither fp16 nor bf16 is enabled";
  EXPECT_EQ(config.optimizer.learning_rate, 1e-3);
  EXPECT_EQ(config.learning_rate_schedule.type, "WarmupDecayLR");
  EXPECT_EQ(config.learning_rate_schedule.warmup_num_steps, 1000u);
  EXPECT_EQ(config.learning_rate_schedule.warmup_max_lr, std::nullopt);
  EXPECT_TRUE(config.learning_rate_schedule.needs_total());
  EXPECT_EQ(line_of(config, "optimizer.params.lr").outcome, Outcome::not_given);
  EXPECT_EQ(line_of(config, "scheduler.params.total_num_steps").became, "as not given: --steps of train");
  EXPECT_EQ(config.deepspeed->train_batch_size, std::nullopt);
  const Config bare = Config::from_json(
      R"({"optimizer": {"type": "AdamW", "params": {}}, "scheduler": {"type": "WarmupDecayLR"},
          "zero_optimization": {"stage": 3}})");
  EXPECT_EQ(config.to_json(), bare.to_json());
}

TEST(DeepSpeed, TheDynamicLossScaleKeepsEveryOneOfItsNumbers) {
  const Config config = load("fp16_dynamic_scale.json");
  EXPECT_EQ(config.precision.parameters, DataType::fp16);
  EXPECT_EQ(config.loss_scale.kind, Config::LossScale::Kind::dynamic);
  EXPECT_EQ(config.loss_scale.value, 16384);
  EXPECT_EQ(config.loss_scale.growth_steps, 500u);
  EXPECT_EQ(config.loss_scale.hysteresis, 4u);
  EXPECT_TRUE(config.loss_scale.consecutive_hysteresis);
  EXPECT_EQ(config.loss_scale.minimum, 0.5);
  EXPECT_EQ(config.optimizer.type, "adam");
  expect_placement(config, Tier::device, Tier::host, Tier::host);
  EXPECT_EQ(Config::from_json(config.to_json()).to_json(), config.to_json());
}

TEST(DeepSpeed, AFixedLossScaleIsThatNumber) {
  const Config config =
      Config::from_json(R"({"fp16": {"enabled": true, "loss_scale": 128, "hysteresis": 4}, "train_batch_size": 1})");
  EXPECT_EQ(config.loss_scale.kind, Config::LossScale::Kind::fixed);
  EXPECT_EQ(config.loss_scale.value, 128);
  EXPECT_EQ(line_of(config, "fp16.hysteresis").outcome, Outcome::not_given);
}

TEST(DeepSpeed, ActivationCheckpointingIsTheTrainersAndWhatIsSwitchedOffIsHarmless) {
  const Config config = load("activation_checkpointing.json");
  EXPECT_EQ(config.zero_stage, 3);
  expect_placement(config, Tier::host, Tier::host, Tier::host);
  EXPECT_EQ(config.precision.gradients, DataType::bf16);
  EXPECT_EQ(config.learning_rate_schedule.type, "WarmupCosineLR");
  EXPECT_EQ(config.learning_rate_schedule.total_num_steps, 20000u);
  EXPECT_EQ(config.learning_rate_schedule.warmup_min_ratio, 0.01);
  EXPECT_EQ(config.learning_rate_schedule.cos_min_ratio, 0.1);
  EXPECT_EQ(line_of(config, "fp16.loss_scale").became, "fp16 is not enabled");
  EXPECT_THAT(keys_without_meaning(config), ElementsAre("bf16.immediate_grad_update", "activation_checkpointing"));
}

TEST(DeepSpeed, MicsShardsWithinGroupsAndHpzOnlyMovesOtherwise) {
  EXPECT_EQ(load("mics.json").communication.shard_group_size, 8);
  const Config hpz = load("zeropp_partitions.json");
  EXPECT_EQ(hpz.communication.shard_group_size, 0);
  EXPECT_THAT(keys_without_meaning(hpz), ElementsAre("zero_optimization.zero_hpz_partition_size"));
}

TEST(DeepSpeed, WhatWouldChangeTheNumbersIsRefusedWithTheKeyAndWhy) {
  EXPECT_THAT(
      refusal_of_file("refused_zeropp.json"),
      AllOf(HasSubstr(":7: zero_optimization.zero_quantized_weights cannot be honoured"), HasSubstr("rounded")));
  EXPECT_THAT(refusal_of_file("refused_compression.json"),
              AllOf(HasSubstr("compression_training cannot be honoured"), HasSubstr("quantizes the model")));
  EXPECT_THAT(refusal_of_file("refused_communication_type.json"),
              AllOf(HasSubstr(":4: communication_data_type \"fp16\" cannot be honoured"), HasSubstr("leave it out")));
  EXPECT_THAT(refusal_of_file("refused_optimizer.json"),
              AllOf(HasSubstr("optimizer.type \"OneBitAdam\" cannot be honoured"), HasSubstr("Adam and AdamW")));
  EXPECT_THAT(refusal_of_file("refused_schedule.json"),
              AllOf(HasSubstr("scheduler.type \"OneCycle\" cannot be honoured"), HasSubstr("WarmupCosineLR")));
  EXPECT_THAT(refusal_of_file("refused_curriculum.json"), HasSubstr("curriculum_learning cannot be honoured"));
  EXPECT_THAT(refusal_of_file("refused_mixture.json"),
              AllOf(HasSubstr(":4: \"budget\" is a key of Ballast, and \"train_batch_size\" one of DeepSpeed"),
                    HasSubstr("--set budget.KEY=VALUE")));
  EXPECT_THAT(refusal(R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})"), HasSubstr("exclude each other"));
  EXPECT_THAT(refusal(R"({"optimizer": {"type": "Adam", "params": {"bias_correction": false}}})"),
              HasSubstr("bias_correction cannot be honoured"));
  EXPECT_THAT(refusal(R"({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}})"),
              HasSubstr("say gradient_clipping"));
  EXPECT_THAT(refusal(R"({"optimizer": {"params": {}, "learning_rate": 1e-3}})"),
              HasSubstr("\"optimizer.learning_rate\" is a key of Ballast"));
  EXPECT_THAT(refusal(R"({"fp16": {"enabled": true, "fp16_master_weights_and_grads": true}})"),
              HasSubstr("master weights are kept in fp32"));
  EXPECT_THAT(refusal(R"({"train_batch_size": 8, "elasticity": {"enabled": true}})"), HasSubstr("elasticity"));
  EXPECT_THAT(refusal(R"({"train_batch_size": 8, "sparse_attention": {"mode": "fixed"}})"), HasSubstr("another model"));
  EXPECT_THAT(refusal(R"({"train_batch_size": 8, "tensor_parallel": {"autotp_size": 4}})"), HasSubstr("autotp_size 4"));
}

TEST(DeepSpeed, AMisspeltKeyIsAnErrorAndAForeignOneIsListed) {
  EXPECT_THAT(refusal("{\n\"zero_optimization\": {\"stage\": 2},\n\"gradient_cliping\": 1.0}"),
              HasSubstr("ds.json:3: unknown key \"gradient_cliping\"; the nearest known key of DeepSpeed is "
                        "\"gradient_clipping\""));
  EXPECT_THAT(refusal(R"({"zero_optimization": {"stage3_max_live_params": 1, "overlap_com": true}})"),
              HasSubstr("zero_optimization.overlap_comm"));
  const Config config = Config::from_json(R"({"train_batch_size": 1, "my_notes": {"author": "someone"}})");
  EXPECT_THAT(keys_without_meaning(config), ElementsAre("my_notes"));
}

TEST(DeepSpeed, ValuesOfTheWrongKindNameTheirLine) {
  EXPECT_THAT(refusal("{\"train_batch_size\":\n\"eight\"}"), HasSubstr("ds.json:2: train_batch_size must be a whole"));
  EXPECT_THAT(refusal(R"({"zero_optimization": {"stage": 4}})"), HasSubstr("zero_optimization.stage"));
  EXPECT_THAT(refusal(R"({"zero_optimization": {"offload_param": {"device": "disk"}}})"), HasSubstr("\"disk\""));
  EXPECT_THAT(refusal(R"({"aio": {"block_size": 1000}})"), HasSubstr("nvme.block_size"));
  EXPECT_THAT(refusal(R"({"zero_optimization": {"cpu_offload": "perhaps"}})"), HasSubstr("must be true or false"));
}

TEST(DeepSpeed, KeysOfOursAreSetBesideTheFile) {
  const Config config = Config::from_file(path_of("zero3_nvme.json"),
                                          {{"budget.host", "1GiB"}, {"nvme.paths", "/a"}, {"zero_stage", "2"}});
  EXPECT_EQ(config.budget.host_bytes, std::uint64_t{1} << 30);
  EXPECT_THAT(config.nvme.paths, ElementsAre("/a"));
  EXPECT_EQ(config.zero_stage, 2);
  EXPECT_NE(config.deepspeed, nullptr);
}

TEST(DeepSpeed, AConfigurationOfOursIsNotTakenForOne) {
  EXPECT_EQ(Config::from_json("{}").deepspeed, nullptr);
  EXPECT_EQ(Config::from_json(Config{}.to_json()).deepspeed, nullptr);
  EXPECT_EQ(Config::from_json(R"({"optimizer": {"type": "adam", "learning_rate": 1e-4}})").deepspeed, nullptr);
}

TEST(DeepSpeed, TheTableHasALineForEveryKeyInTheFilesOrder) {
  const Config config = load("gpt_tiny_nvme.json");
  const std::string text = to_text(*config.deepspeed);
  std::size_t at = 0;
  for (const DeepSpeedLine& line : config.deepspeed->lines) {
    EXPECT_NE(text.find("\n  " + line.key + " ", at), text.npos) << line.key;
    at = text.find("\n  " + line.key + " ", at);
  }
  EXPECT_EQ(config.deepspeed->lines.size(), 31u) << "keys with values, counted in the file";
  EXPECT_EQ(line_of(config, "optimizer.params.weight_decay").became, "optimizer.weight_decay 0.1");
  EXPECT_THAT(text, AllOf(HasSubstr("-> zero_stage 3"), HasSubstr("- nothing: host memory is always pinned")));
}

// --- batches, as DeepSpeed's documentation derives them -------------------------------------------------------------

DeepSpeedFile::Batch batch_of(const std::string& text, int ranks) {
  return Config::from_json(text, "ds.json").deepspeed->batch(ranks);
}

TEST(DeepSpeed, TheThirdOfTheBatchSizesFollowsFromTheOtherTwo) {
  const auto expect = [](const std::string& text, int ranks, std::optional<std::int64_t> sequences,
                         std::optional<std::int64_t> micro_batches) {
    const auto batch = batch_of(text, ranks);
    EXPECT_EQ(batch.sequences, sequences) << text;
    EXPECT_EQ(batch.micro_batches, micro_batches) << text;
  };
  expect(R"({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4})", 2, 32, 4);
  expect(R"({"train_batch_size": 32, "gradient_accumulation_steps": 8})", 2, 32, 8);
  expect(R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8})", 2, 64, 8);
  expect(R"({"train_batch_size": 32})", 2, 32, 1);
  expect(R"({"train_micro_batch_size_per_gpu": 4})", 2, 8, 1);
  expect(R"({"gradient_accumulation_steps": 8})", 2, std::nullopt, 8);
  expect(R"({"zero_optimization": {"stage": 1}})", 2, std::nullopt, std::nullopt);
  expect(R"({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8})", 2, 64,
         8);
}

TEST(DeepSpeed, BatchSizesThatContradictEachOtherAreRefusedWithTheNumbers) {
  const auto refused = [](const std::string& text, int ranks) {
    return refusal([&] {
      batch_of(text, ranks);
      return Config{};
    });
  };
  EXPECT_THAT(
      refused(R"({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8})", 1),
      AllOf(HasSubstr("train_batch_size 64 is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 8 x "
                      "ranks 1 = 32"),
            HasSubstr("--batch")));
  EXPECT_THAT(refused(R"({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4})", 1),
              HasSubstr("train_batch_size 10 does not divide"));
  EXPECT_THAT(refused(R"({"train_batch_size": 10, "gradient_accumulation_steps": 4})", 1),
              HasSubstr("train_batch_size 10 does not divide"));
}

}  // namespace
}  // namespace ballast
