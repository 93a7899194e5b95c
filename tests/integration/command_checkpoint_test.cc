// `ballast checkpoint`: what users see of checkpoints, and the way to safetensors and back.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "command_runner.h"
#include "support/safetensors_support.h"

namespace ballast::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Arguments = std::vector<std::string>;
using Json = nlohmann::json;

class CheckpointCommand : public ::testing::Test {
 protected:
  CommandResult train(const std::string& engine, const Arguments& more, const std::string& model = "gpt-tiny") const {
    Arguments all = {"train",
                     "--model",
                     source_path("configs/models/" + model + ".json"),
                     "--engine",
                     source_path("configs/engine/" + engine + ".json"),
                     "--data",
                     data_,
                     "--sequence",
                     "16",
                     "--batch",
                     "1",
                     "--set",
                     "nvme.paths=" + path_ + "/states"};
    all.insert(all.end(), more.begin(), more.end());
    return run_command(all);
  }
  CommandResult checkpoint(Arguments arguments) const {
    arguments.insert(arguments.begin(), "checkpoint");
    return run_command(arguments);
  }
  std::string done(const Arguments& arguments) const {
    const CommandResult result = checkpoint(arguments);
    EXPECT_EQ(result.status, 0) << result.error;
    EXPECT_THAT(result.error, IsEmpty());
    return result.output;
  }
  // The one line of an error.
  std::string refused(const Arguments& arguments, int status) const {
    const CommandResult result = checkpoint(arguments);
    EXPECT_EQ(result.status, status) << result.error;
    EXPECT_EQ(result.error_lines().size(), 1U) << result.error;
    return result.error;
  }
  void train_two_steps() const {
    const CommandResult result = train("in-memory", {"--steps", "2", "--checkpoint", checkpoints_, "--every", "1"});
    ASSERT_EQ(result.status, 0) << result.error;
  }

  const ScratchFolder scratch_;
  const std::string path_ = scratch_.path(), checkpoints_ = path_ + "/checkpoints";
  const std::string data_ = [&] {
    std::string text;
    for (int i = 0; i < 400; ++i) text += "line " + std::to_string(i * 7919) + " of the text\n";
    return scratch_.write("text", text);
  }();
};

TEST_F(CheckpointCommand, InspectTellsAndVerifyChecks) {
  train_two_steps();
  const std::string json = path_ + "/out.json";
  EXPECT_THAT(done({"inspect", checkpoints_, "--json", json}),
              AllOf(HasSubstr(checkpoints_ + "/step-2: step 2"), HasSubstr("wte.weight"), HasSubstr("bf16, step 2"),
                    HasSubstr("\"learning_rate\"")));
  const Json out = Json::parse(read_file(json));
  EXPECT_EQ(out.at("step"), 2);
  EXPECT_EQ(out.at("world_size"), 1);
  EXPECT_EQ(out.at("tensors").at(0).at("name"), "wte.weight");
  std::int64_t elements = 0;
  for (const Json& tensor : out.at("tensors")) {
    std::int64_t count = 1;
    for (const Json& dimension : tensor.at("shape")) count *= dimension.get<std::int64_t>();
    elements += count;
  }
  EXPECT_EQ(out.at("parameters"), elements);
  EXPECT_THAT(done({"verify", checkpoints_ + "/step-1"}), HasSubstr("every chunk is what was written"));
  const std::string chunks = checkpoints_ + "/step-1/ballast-rank0.chunks";
  std::string bytes = read_file(chunks);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 16);
  write_bytes(chunks, bytes);
  EXPECT_THAT(refused({"verify", checkpoints_ + "/step-1"}, 1), AllOf(HasSubstr(chunks), HasSubstr("step 1")));
  EXPECT_THAT(refused({"export", checkpoints_ + "/step-1", path_ + "/never"}, 1), HasSubstr(chunks));
  EXPECT_FALSE(std::filesystem::exists(path_ + "/never/model.safetensors"));
  done({"verify", checkpoints_});
}

TEST_F(CheckpointCommand, ACommittedRunIsInspectedVerifiedAndExported) {
  ASSERT_EQ(train("nvme", {"--steps", "2", "--set", "durability=step"}).status, 0);
  EXPECT_THAT(done({"inspect", path_ + "/states"}), HasSubstr("/states: step 2"));
  done({"verify", path_ + "/states"});
  EXPECT_THAT(done({"export", path_ + "/states", path_ + "/out"}), HasSubstr("1 safetensors file"));
}

TEST_F(CheckpointCommand, AnExportIsImportedAndTrainedFrom) {
  train_two_steps();
  for (const bool exact : {false, true}) {
    const std::string name = path_ + (exact ? "/exact" : "/plain");
    Arguments exporting = {"export", checkpoints_, name};
    if (exact) exporting.push_back("--exact");
    EXPECT_THAT(done(exporting), HasSubstr("1 safetensors file"));
    const std::string bytes = read_file(name + "/model.safetensors");
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), 8);
    const Json header = Json::parse(bytes.substr(8, length));
    // The names and orientations of GPT-2's own file.
    EXPECT_THAT(header.at("h.0.attn.c_attn.weight").at("shape"), ElementsAre(128, 384));
    EXPECT_EQ(header.at("wte.weight").at("dtype"), exact ? "F32" : "BF16");
    EXPECT_EQ(header.at("__metadata__").at("format"), "pt");
    EXPECT_THAT(done({"import", name, name + "-ck"}), AllOf(HasSubstr("a GPT-2: "), HasSubstr("step 0")));
    exporting[1] = name + "-ck";
    exporting[2] = name + "-again";
    done(exporting);
    EXPECT_EQ(read_file(name + "-again/model.safetensors"), bytes);
    for (const char* engine : {"nvme", "in-memory"}) {
      const CommandResult result = train(engine, {"--steps", "1", "--checkpoint", name + "-ck", "--resume", "--set",
                                                  "optimizer.weight_decay=0.3", "--json", path_ + "/run.json"});
      EXPECT_EQ(result.status, 0) << result.error;
      EXPECT_THAT(result.output, HasSubstr("resumed from " + name + "-ck/step-0: going on at step 0"));
      EXPECT_EQ(Json::parse(read_file(path_ + "/run.json")).at("losses").size(), 1U);
      std::filesystem::remove_all(name + "-ck/step-1");
    }
  }
}

TEST_F(CheckpointCommand, ShardsAndFilesOfOtherWritersAreImported) {
  train_two_steps();
  const std::string folder = path_ + "/shards";
  EXPECT_THAT(done({"export", checkpoints_, folder, "--shard", "1MiB"}), HasSubstr("safetensors files"));
  EXPECT_TRUE(std::filesystem::exists(folder + "/model.safetensors.index.json"));
  done({"import", folder, path_ + "/a/step-0"});
  EXPECT_TRUE(std::filesystem::exists(path_ + "/a/step-0/ballast-rank0.chunks"));
  done({"export", checkpoints_, path_ + "/whole", "--model", source_path("configs/models/gpt-tiny.json")});
  const Json config = Json::parse(read_file(path_ + "/whole/config.json"));
  EXPECT_EQ(config.at("n_head"), 4);
  EXPECT_EQ(config.at("n_layer"), 5);
  EXPECT_THAT(
      refused({"export", checkpoints_, path_ + "/no", "--model", source_path("configs/models/gpt-10m.json")}, 2),
      HasSubstr("another shape of embedding/wte.weight"));
  // As the model with its head is saved: a prefix, the tied head again, and masks that are no parameters.
  const std::string bytes = read_file(path_ + "/whole/model.safetensors");
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  const Json header = Json::parse(bytes.substr(8, length));
  std::string data = bytes.substr(8 + length);
  Json other = Json::object();
  for (const auto& [name, tensor] : header.items()) {
    if (name != "__metadata__") other["transformer." + name] = tensor;
  }
  const auto append = [&](const std::string& name, Json tensor, const std::string& part) {
    tensor["data_offsets"] = {data.size(), data.size() + part.size()};
    other[name] = tensor;
    data += part;
  };
  const Json tokens = header.at("wte.weight");
  const std::size_t begin = tokens.at("data_offsets")[0], end = tokens.at("data_offsets")[1];
  append("lm_head.weight", tokens, data.substr(begin, end - begin));
  append("transformer.h.0.attn.bias", {{"dtype", "BOOL"}, {"shape", {1, 1, 2, 2}}}, std::string(4, '\1'));
  const std::string file = scratch_.write("other.safetensors", safetensors_bytes(other.dump(), data));
  EXPECT_THAT(done({"import", file, path_ + "/b"}), HasSubstr("tied output projection"));
  for (const char* name : {"a", "b"}) {
    done({"export", path_ + "/" + name, path_ + "/out-" + name});
    EXPECT_EQ(read_file(path_ + "/out-" + name + "/model.safetensors"), bytes);
  }
  // A head of its own.
  data[data.size() - 6] = static_cast<char>(data[data.size() - 6] ^ 1);
  const std::string untied = scratch_.write("untied.safetensors", safetensors_bytes(other.dump(), data));
  EXPECT_THAT(done({"import", untied, path_ + "/c"}), HasSubstr("its own output projection"));
  EXPECT_THAT(done({"inspect", path_ + "/c"}), HasSubstr("final/lm_head.weight"));
  EXPECT_THAT(done({"import", file, path_ + "/d", "--dtype", "fp32"}), HasSubstr("step 0"));
  EXPECT_THAT(done({"inspect", path_ + "/d"}), HasSubstr("fp32"));
}

TEST_F(CheckpointCommand, WhatCannotBeIsRefusedInOneLine) {
  train_two_steps();
  EXPECT_THAT(refused({"inspect", path_ + "/none"}, 1), HasSubstr("holds no checkpoint"));
  refused({"inspect"}, 2);
  refused({"inspect", checkpoints_, "--wrong"}, 2);
  refused({"export", checkpoints_}, 2);
  EXPECT_THAT(refused({"export", checkpoints_, path_ + "/out", "--shard", "5"}, 2), HasSubstr("--shard"));
  refused({}, 2);
  EXPECT_THAT(refused({"import", path_ + "/none", path_ + "/to"}, 1), HasSubstr("none"));
  EXPECT_THAT(refused({"import", data_, path_ + "/to"}, 1), HasSubstr("no safetensors file"));
  const std::string other = scratch_.write(
      "other.safetensors", safetensors_bytes(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "1234"));
  EXPECT_THAT(refused({"import", other, path_ + "/to"}, 2), HasSubstr("no tensor wte.weight"));
  EXPECT_FALSE(std::filesystem::exists(path_ + "/to"));
  done({"export", checkpoints_, path_ + "/out"});
  EXPECT_THAT(refused({"import", path_ + "/out", checkpoints_}, 2), HasSubstr("holds step-"));
  EXPECT_THAT(refused({"import", path_ + "/out", path_ + "/to", "--dtype", "int8"}, 2), HasSubstr("dtype"));
  done({"import", path_ + "/out", path_ + "/to"});
  // Of another shape than the model that is trained.
  const CommandResult result =
      train("in-memory", {"--steps", "1", "--checkpoint", path_ + "/to", "--resume"}, "gpt-10m");
  EXPECT_THAT(result.error, HasSubstr("is of another model"));
  EXPECT_EQ(result.status, 2);
}

}  // namespace
}  // namespace ballast::testing
