// Checkpoints read without an engine, exported, imported, and gone on from.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/engine/checkpoint.h>
#include <ballast/engine/safetensors.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "support/engine_support.h"
#include "support/on_ranks.h"
#include "support/safetensors_support.h"

// GCC 12 takes the strings of temporaries that are handed on for uninitialised.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace ballast::testing {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

std::vector<ModelUnit> units_of(const std::vector<SyntheticUnit>& model) {
  std::vector<ModelUnit> units;
  for (const SyntheticUnit& unit : model) units.push_back({unit.name, unit.parameters});
  return units;
}

std::vector<float> all_values(CheckpointReader& reader) {
  std::vector<float> all;
  for (std::size_t i = 0; i < reader.parameters().size(); ++i) {
    std::vector<float> part(static_cast<std::size_t>(reader.parameters()[i].elements));
    reader.read(i, 0, part);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

std::vector<float> all_values(SafetensorsReader& reader, const CheckpointReader& order) {
  std::vector<float> all;
  for (const StoredParameter& parameter : order.parameters()) {
    const std::size_t index = reader.find(parameter.unit + "." + parameter.name).value();
    EXPECT_EQ(reader.tensors()[index].shape, parameter.shape);
    std::vector<float> part(static_cast<std::size_t>(parameter.elements));
    reader.read(index, 0, part);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

class CheckpointFiles : public ::testing::Test {
 protected:
  // Trains and saves; returns the values at the end.
  std::vector<float> save(const Config& config, int steps, const std::string& to,
                          const std::vector<SyntheticUnit>& model) {
    Engine engine(config);
    SyntheticTrainer trainer(engine, model);
    engine.commit();
    trainer.initialize();
    while (trainer.next_step() < steps) trainer.step();
    engine.save_checkpoint(to);
    return trainer.values();
  }
  std::vector<float> save(int steps, const std::string& to) { return save(config_, steps, to, model_); }

  const Watchdog watchdog_{300};
  const TemporaryDirectory directory_;
  const std::string path_ = directory_.path(), checkpoint_ = path_ + "/checkpoints/step-3";
  const std::vector<SyntheticUnit> model_ = small_model(3);
  const Config config_ = plain_config(path_ + "/run", Tier::nvme, Timing::just_in_time);
};

TEST_F(CheckpointFiles, AReaderSeesWhatTheEngineHad) {
  Engine engine(config_);
  SyntheticTrainer trainer(engine, model_);
  engine.commit();
  trainer.initialize();
  while (trainer.next_step() < 3) trainer.step();
  engine.save_checkpoint(checkpoint_);
  for (const std::string& path : {checkpoint_, path_ + "/checkpoints"}) {
    CheckpointReader reader({path});
    EXPECT_EQ(reader.path(), checkpoint_);
    EXPECT_EQ(reader.step(), 3U);
    EXPECT_EQ(reader.world_size(), 1);
    ASSERT_EQ(reader.parameters().size(), 9U);
    EXPECT_EQ(all_values(reader), trainer.values());
    const std::size_t index = reader.find("u.1", "weight").value();
    const StoredParameter& weight = reader.parameters()[index];
    EXPECT_EQ(weight.step_count, 3U);
    std::vector<float> a(17), b(17), c(17), d(17);
    reader.read_moments(index, 5, a, b);
    engine.read_moments({1, 0}, 5, c, d);
    EXPECT_EQ(a, c);
    EXPECT_EQ(b, d);
    EXPECT_EQ(reader.find("u.1", "none"), std::nullopt);
    EXPECT_THROW(reader.read(index, weight.elements - 16, a), UsageError);
    EXPECT_THROW(reader.read(99, 0, a), UsageError);
    reader.verify();
  }
  EXPECT_THROW(CheckpointReader({path_ + "/none"}), IoError);
  EXPECT_THROW(CheckpointReader({path_}), IoError);
}

TEST_F(CheckpointFiles, DamageIsFoundWhereverItIs) {
  save(1, checkpoint_);
  const std::string file = checkpoint_ + "/ballast-rank0.chunks";
  const std::string whole = bytes_of(file);
  std::vector<std::uint64_t> seen;
  for (const std::uint64_t at : {std::uint64_t{4096}, std::uint64_t{70'000}, whole.size() / 2}) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 4);
    write_bytes(file, damaged);
    EXPECT_THAT(text_of<CorruptionError>([&] { CheckpointReader({checkpoint_}).verify(); }),
                AllOf(HasSubstr(file), HasSubstr("step 1"), HasSubstr("unit u.")))
        << at;
  }
  write_bytes(file, whole.substr(0, whole.size() / 2));
  EXPECT_THAT(text_of<CorruptionError>([&] { CheckpointReader({checkpoint_}).verify(); }), HasSubstr("cut short"));
  write_bytes(file, whole);
  CheckpointReader({checkpoint_}).verify();
  const std::string manifest = checkpoint_ + "/ballast-rank0.step-1.manifest";
  std::string wrong = bytes_of(manifest);
  wrong[wrong.size() / 2] = static_cast<char>(wrong[wrong.size() / 2] ^ 1);
  write_bytes(manifest, wrong);
  EXPECT_THAT(text_of<CorruptionError>([&] { CheckpointReader{{checkpoint_}}; }), HasSubstr(manifest));
}

TEST_F(CheckpointFiles, ACommittedRunIsReadOnceItsEngineHasGone) {
  Config config = config_;
  config.durability.every_steps = 1;
  std::vector<float> values;
  {
    Engine engine(config);
    SyntheticTrainer trainer(engine, model_);
    engine.commit();
    trainer.initialize();
    while (trainer.next_step() < 3) trainer.step();
    engine.settle();
    values = trainer.values();
    EXPECT_THAT(text_of<IoError>([&] { CheckpointReader{config.nvme.paths}; }), HasSubstr("running engine"));
  }
  CheckpointReader reader(config.nvme.paths);
  EXPECT_EQ(reader.step(), 3U);
  EXPECT_EQ(all_values(reader), values);
  reader.verify();
}

TEST_F(CheckpointFiles, AnExportComesBackAndARunGoesOnFromIt) {
  const std::vector<float> values = save(3, checkpoint_);
  CheckpointReader reader({checkpoint_});
  for (const bool exact : {false, true}) {
    const std::string name = path_ + (exact ? "/exact" : "/plain");
    EXPECT_EQ(export_safetensors(reader, name, {.exact = exact}), 1);
    SafetensorsReader exported(name);
    EXPECT_EQ(exported.tensors().front().dtype, exact ? "F32" : "BF16");
    const std::vector<float> there = all_values(exported, reader);
    if (exact) {
      EXPECT_EQ(there, values);
    } else {
      for (std::size_t i = 0; i < values.size(); ++i) {
        ASSERT_NEAR(there[i], values[i], std::abs(values[i]) * 0x1p-8);
      }
    }
    const std::string again = name + "-imported/step-0";
    import_safetensors(exported, units_of(model_), again);
    CheckpointReader imported({again});
    imported.verify();
    EXPECT_EQ(imported.step(), 0U);
    EXPECT_EQ(imported.settings(), "{}");
    EXPECT_EQ(all_values(imported), there);
    export_safetensors(imported, name + "-again", {.exact = exact});
    EXPECT_EQ(bytes_of(name + "-again/model.safetensors"), bytes_of(name + "/model.safetensors"));
    // With any settings, placement and type of parameters.
    for (const Tier tier : {Tier::nvme, Tier::device}) {
      Config config = plain_config(path_ + "/next", tier, Timing::just_in_time);
      config.optimizer.beta1 = 0.7;
      config.loss_scale.kind = Config::LossScale::Kind::fixed;
      config.loss_scale.value = 128;
      config.precision.parameters = tier == Tier::device ? DataType::fp32 : DataType::bf16;
      Engine engine(config);
      SyntheticTrainer trainer(engine, model_);
      engine.commit({ExistingRun::resume, name + "-imported"});
      ASSERT_TRUE(trainer.resume());
      EXPECT_EQ(engine.resumed()->step, 0U);
      EXPECT_EQ(trainer.values(), there);
      std::vector<float> a(9, 1.0F), b(9, 1.0F);
      engine.read_moments({1, 0}, 0, a, b);
      EXPECT_THAT(a, Each(0.0F));
      EXPECT_THAT(b, Each(0.0F));
      auto step = engine.begin_step();
      EXPECT_EQ(step.loss_scale(), 128.0);
      step.discard();
      trainer.step();
      EXPECT_EQ(engine.step_count({1, 0}), 1U);
    }
  }
}

TEST_F(CheckpointFiles, ManyRanksExportWhatOneWould) {
  save(0, path_ + "/one/step-0");
  const std::string several = path_ + "/eleven/step-0";
  on_ranks(11, [&](int, const std::shared_ptr<Communicator>& communicator) {
    Engine engine(config_, {.communicator = communicator});
    SyntheticTrainer trainer(engine, model_);
    engine.commit();
    trainer.initialize();
    engine.save_checkpoint(several);
  });
  CheckpointReader one({path_ + "/one"}), eleven({several});
  EXPECT_EQ(eleven.world_size(), 11);
  eleven.verify();
  export_safetensors(one, path_ + "/from-one");
  export_safetensors(eleven, path_ + "/from-eleven");
  EXPECT_EQ(bytes_of(path_ + "/from-one/model.safetensors"), bytes_of(path_ + "/from-eleven/model.safetensors"));
  SafetensorsReader source(path_ + "/from-eleven");
  import_safetensors(source, units_of(model_), path_ + "/imported/step-0");
  on_ranks(11, [&](int, const std::shared_ptr<Communicator>& communicator) {
    Engine engine(config_, {.communicator = communicator});
    SyntheticTrainer trainer(engine, model_);
    engine.commit({ExistingRun::resume, path_ + "/imported"});
    EXPECT_TRUE(trainer.resume());
    trainer.step();
  });
  std::filesystem::remove(several + "/ballast-rank1.step-0.manifest");
  EXPECT_THAT(text_of<CorruptionError>([&] { CheckpointReader{{several}}; }), HasSubstr("manifest of rank 1"));
}

TEST_F(CheckpointFiles, ShardsHaveAnIndexAndFoldersAreNotMixed) {
  save(1, checkpoint_);
  CheckpointReader reader({checkpoint_});
  const std::string folder = path_ + "/shards";
  const int files = export_safetensors(reader, folder, {.shard_bytes = 30'000});
  EXPECT_GT(files, 1);
  EXPECT_TRUE(std::filesystem::exists(folder + "/model-00001-of-0000" + std::to_string(files) + ".safetensors"));
  SafetensorsReader shards(folder);
  export_safetensors(reader, path_ + "/whole");
  SafetensorsReader whole(path_ + "/whole");
  EXPECT_EQ(all_values(shards, reader), all_values(whole, reader));
  EXPECT_EQ(export_safetensors(reader, folder, {.shard_bytes = 30'000}), files);
  EXPECT_THAT(text_of<ConfigError>([&] { export_safetensors(reader, folder); }), HasSubstr("of another export"));
  import_safetensors(shards, units_of(model_), path_ + "/imported/step-0");
  CheckpointReader imported({path_ + "/imported"});
  EXPECT_EQ(all_values(imported), all_values(whole, reader));
  EXPECT_THAT(text_of<ConfigError>([&] {
                export_safetensors(reader, path_ + "/names", {.name = [](const StoredParameter& p) { return p.name; }});
              }),
              HasSubstr("two tensors would be named \"weight\""));
}

// Header lengths of all remainders; names that JSON escapes.
TEST_F(CheckpointFiles, TensorsBeginOnEightBytes) {
  for (std::size_t length = 1; length <= 16; ++length) {
    const std::vector<SyntheticUnit> model = {{"\"\\\n", {{std::string(length, 'n'), {3}}, {"none", {0, 4}}}}};
    const std::string place = path_ + "/" + std::to_string(length);
    save(plain_config(place, Tier::host, Timing::just_in_time), 0, place + "/step-0", model);
    CheckpointReader reader({place + "/step-0"});
    export_safetensors(reader, place);
    const std::string bytes = bytes_of(place + "/model.safetensors");
    std::uint64_t header = 0;
    std::memcpy(&header, bytes.data(), 8);
    EXPECT_EQ(header % 8, 0U);
    EXPECT_EQ(bytes[8], '{');
    const std::size_t end = bytes.find_last_not_of(' ', 7 + header);
    EXPECT_EQ(bytes[end], '}');
    SafetensorsReader again(place);
    ASSERT_EQ(again.tensors().size(), 2U);
    EXPECT_TRUE(again.find("\"\\\n." + std::string(length, 'n')).has_value());
  }
}

TEST_F(CheckpointFiles, AnImportThatDoesNotFitLeavesNothing) {
  const std::string file = path_ + "/x.safetensors", to = path_ + "/imported/step-0";
  const std::string data(16 + 8 + 32, '\1');
  write_bytes(file, safetensors_bytes(R"({"u.a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},)"
                                      R"("u.b":{"dtype":"BF16","shape":[4],"data_offsets":[16,24]},)"
                                      R"("u.i":{"dtype":"I64","shape":[4],"data_offsets":[24,56]}})",
                                      data));
  SafetensorsReader reader(file);
  const auto refusal = [&](const std::vector<ParameterSpec>& parameters, const ImportOptions& options = {}) {
    const std::string text = text_of<ConfigError>([&] {
      import_safetensors(reader, {{"u", parameters}}, to, options);
    });
    EXPECT_FALSE(std::filesystem::exists(to));
    EXPECT_FALSE(std::filesystem::exists(to + ".new"));
    return text;
  };
  const ImportOptions no_integers = {.ignore = [](const SafetensorsTensor& tensor) { return tensor.dtype == "I64"; }};
  EXPECT_THAT(refusal({{"a", {2, 2}}, {"b", {4}}}), HasSubstr("no parameter is made of \"u.i\""));
  EXPECT_THAT(refusal({{"a", {2, 2}}, {"b", {4}}, {"c", {4}}}, no_integers), HasSubstr("no tensor \"u.c\""));
  EXPECT_THAT(refusal({{"a", {4}}, {"b", {4}}}, no_integers), HasSubstr("is [2, 2], and the parameter is [4]"));
  EXPECT_THAT(refusal({{"a", {2, 2}}, {"b", {4}}, {"i", {4}}}), HasSubstr("is of I64"));
  import_safetensors(reader, {{"u", {{"a", {2, 2}}, {"b", {4}}}}}, to, no_integers);
  CheckpointReader imported({to});
  EXPECT_EQ(imported.parameters()[0].dtype, DataType::fp32);
  EXPECT_EQ(imported.parameters()[1].dtype, DataType::bf16);
  // An interruption leaves the older one as it was.
  int calls = 0;
  ImportOptions interrupted = no_integers;
  interrupted.check_interrupt = [&] {
    if (++calls == 2) throw std::runtime_error("interrupted");
  };
  EXPECT_THROW(import_safetensors(reader, {{"u", {{"a", {2, 2}}, {"b", {4}}}}}, to, interrupted), std::runtime_error);
  EXPECT_FALSE(std::filesystem::exists(to + ".new"));
  CheckpointReader({to}).verify();
}

TEST_F(CheckpointFiles, RoundingIsToNearestEvenAndOnlyWhereAsked) {
  const std::string file = path_ + "/x.safetensors";
  const std::vector<float> values = {257.0F, 259.0F, 1.0F, 70000.0F};
  write_bytes(file, safetensors_bytes(R"({"u.a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}})",
                                      {reinterpret_cast<const char*>(values.data()), 16}));
  SafetensorsReader reader(file);
  const auto imported = [&](std::optional<DataType> dtype) {
    import_safetensors(reader, {{"u", {{"a", {4}}}}}, path_ + "/step-0", {.dtype = dtype});
    CheckpointReader result({path_ + "/step-0"});
    std::vector<float> published(4);
    if (!dtype) result.read_published(0, 0, 4, reinterpret_cast<std::byte*>(published.data()));
    EXPECT_TRUE(dtype.has_value() || published == values);
    return all_values(result);
  };
  EXPECT_EQ(imported({}), values);
  EXPECT_EQ(imported(DataType::fp32), values);
  EXPECT_EQ(imported(DataType::bf16), (std::vector<float>{256, 260, 1, 70144}));
  EXPECT_THAT(text_of<ConfigError>([&] { imported(DataType::fp16); }),
              AllOf(HasSubstr("element 3 of tensor \"u.a\""), HasSubstr("fp16")));
}

TEST_F(CheckpointFiles, ParametersAloneLoadByNameIntoAnotherModel) {
  save(3, checkpoint_);
  CheckpointReader reader({checkpoint_});
  std::vector<SyntheticUnit> model = model_;
  std::swap(model[0], model[2]);  // another order, one parameter frozen, one of fp32, one more
  model[1].parameters[1].options.trainable = false;
  model[1].parameters[0].options.dtype = DataType::fp32;
  for (const bool more : {false, true}) {
    if (more) model[0].parameters.push_back({"head", {5}});
    Config config = plain_config(path_ + "/next", Tier::nvme, Timing::just_in_time);
    config.optimizer.beta1 = 0.7;
    config.durability.every_steps = more ? 1 : 0;
    Engine engine(config);
    SyntheticTrainer trainer(engine, model);
    engine.commit();
    Engine::Fill others;
    if (more) {
      EXPECT_THAT(text_of<ConfigError>([&] { parameters_of(reader, units_of(model)); }), HasSubstr("u.2/head"));
      others = [](ParameterId, std::int64_t, std::span<float> values) {
        std::fill(values.begin(), values.end(), 0.5F);
      };
    }
    engine.initialize(parameters_of(reader, units_of(model), others));
    for (std::uint32_t u = 0; u < 3; ++u) {
      for (std::uint32_t p = 0; p < 3; ++p) {
        const std::size_t index = reader.find(model[u].name, model[u].parameters[p].name).value();
        std::vector<float> there(static_cast<std::size_t>(reader.parameters()[index].elements)), here(there.size());
        reader.read(index, 0, there);
        engine.read({u, p}, 0, here);
        EXPECT_EQ(here, there);
        EXPECT_EQ(engine.step_count({u, p}), 0U);
      }
    }
    if (more) {
      EXPECT_EQ(read_one(engine, {0, 3}, 4), 0.5F);
    }
    trainer.step();
    EXPECT_EQ(engine.step_count({0, 0}), 1U);
  }
  std::vector<SyntheticUnit> other = model_;
  other[0].parameters[0].shape = {33, 300};
  EXPECT_THAT(text_of<ConfigError>([&] { parameters_of(reader, units_of(other)); }),
              AllOf(HasSubstr("u.0/weight"), HasSubstr("another shape")));
}

}  // namespace
}  // namespace ballast::testing
