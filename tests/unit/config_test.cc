// The engine configuration: what is read, what is refused, and with which words.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/engine/config.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>

namespace ballast {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

// The text of the ConfigError, which must be one line; "accepted" where there is none.
std::string refusal(const std::function<void()>& act) {
  try {
    act();
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), Not(HasSubstr("\n")));
    EXPECT_LT(std::string(error.what()).size(), 500u);
    return error.what();
  }
  return "accepted";
}
std::string refusal(std::string_view text) {
  return refusal([&] { Config::from_json(text, "e.json"); });
}

class ConfigFile : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/ballast-config-XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    directory_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }
  std::string write(const std::string& text) {
    const std::string path = directory_ + "/e.json";
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }
  Config load(const std::string& text, const std::vector<std::pair<std::string, std::string>>& overrides) {
    return Config::from_file(write(text), overrides);
  }
  std::string set_refusal(const std::string& key, const std::string& value) {
    return refusal([&] { load("{}", {{key, value}}); });
  }
  std::string directory_;
};

TEST(Config, AnEmptyObjectGivesTheDefaults) {
  const Config config = Config::from_json("{}");
  EXPECT_EQ(config.budget.device_bytes, std::uint64_t{2} << 30);
  EXPECT_EQ(config.budget.host_bytes, std::uint64_t{8} << 30);
  EXPECT_EQ(config.optimizer.clip_global_norm, 1.0);
  EXPECT_TRUE(config.placement.automatic);
  EXPECT_EQ(config.to_json(), Config{}.to_json());
}

TEST(Config, EveryKeyIsReadAndWrittenBackTheSame) {
  const Config config = Config::from_json(R"({
    "zero_stage": 2, "device": "host", "budget": {"device": "1.5GiB", "host": "1000B"},
    "nvme": {"paths": ["/a", "/b"], "block_size": "128KiB", "queue_depth": 2, "backend": "threads"},
    "placement": {"parameters": "host", "gradients": "device", "optimizer": "nvme"},
    "precision": {"parameters": "fp16", "gradients": "bf16", "moments": "bf16"},
    "optimizer": {"type": "adam", "learning_rate": 0.1, "betas": [0.9, 0.999], "epsilon": 1e-7, "weight_decay": 0,
                  "timing": "after_backward", "clip_global_norm": null},
    "loss_scale": 128, "durability": "none", "threads": 3,
    "communication": {"backend": "single", "timeout_seconds": 1.5, "shard_group_size": 1}})");
  EXPECT_EQ(config.zero_stage, 2);
  EXPECT_EQ(config.device, "host");
  EXPECT_EQ(config.budget.device_bytes, (std::uint64_t{3} << 29));
  EXPECT_EQ(config.budget.host_bytes, 1000u);
  EXPECT_THAT(config.nvme.paths, testing::ElementsAre("/a", "/b"));
  EXPECT_EQ(config.nvme.block_bytes, 131072u);
  EXPECT_EQ(config.nvme.queue_depth, 2u);
  EXPECT_EQ(config.nvme.backend, "threads");
  EXPECT_FALSE(config.placement.automatic);
  EXPECT_EQ(config.placement.parameters, Tier::host);
  EXPECT_EQ(config.placement.gradients, Tier::device);
  EXPECT_EQ(config.placement.optimizer, Tier::nvme);
  EXPECT_EQ(config.precision.parameters, DataType::fp16);
  EXPECT_EQ(config.precision.gradients, DataType::bf16);
  EXPECT_EQ(config.precision.moments, MomentType::bf16);
  EXPECT_EQ(config.optimizer.type, "adam");
  EXPECT_EQ(config.optimizer.learning_rate, 0.1);
  EXPECT_EQ(config.optimizer.beta2, 0.999);
  EXPECT_EQ(config.optimizer.epsilon, 1e-7);
  EXPECT_EQ(config.optimizer.weight_decay, 0);
  EXPECT_EQ(config.optimizer.timing, Timing::after_backward);
  EXPECT_FALSE(config.optimizer.clip_global_norm.has_value());
  EXPECT_EQ(config.loss_scale.kind, Config::LossScale::Kind::fixed);
  EXPECT_EQ(config.loss_scale.value, 128);
  EXPECT_EQ(config.threads, 3);
  EXPECT_EQ(config.communication.timeout_seconds, 1.5);
  const std::string text = config.to_json();
  EXPECT_EQ(Config::from_json(text).to_json(), text);
  EXPECT_THAT(text, AllOf(HasSubstr("\"1536MiB\""), HasSubstr("0.999"), HasSubstr("\"learning_rate\": 0.1,")));
}

TEST(Config, AnUnknownKeyNamesTheNearestOneWithItsSection) {
  const auto nearest = [](std::string_view text) {
    const std::string error = refusal(text);
    const std::size_t at = error.find("nearest known key is ");
    return at == error.npos ? error : error.substr(at + 21);
  };
  EXPECT_EQ(nearest(R"({"budgett": {}})"), "\"budget\"");
  EXPECT_EQ(nearest(R"({"optimizer": {"learning_rte": 1}})"), "\"optimizer.learning_rate\"");
  EXPECT_EQ(nearest(R"({"learning_rate": 1})"), "\"optimizer.learning_rate\"");
  EXPECT_EQ(nearest(R"({"optimizer": {"Timing": "auto"}})"), "\"optimizer.timing\"");
  EXPECT_EQ(nearest(R"({"nvme": {"path": "run"}})"), "\"nvme.paths\"");
  EXPECT_EQ(nearest(R"({"budget": {"hots": "1GiB"}})"), "\"budget.host\"");
  EXPECT_EQ(nearest(R"({"precision": {"moment": "fp32"}})"), "\"precision.moments\"");
  EXPECT_EQ(nearest(R"({"placement": {"optimiser": "host"}})"), "\"placement.optimizer\"");
  EXPECT_EQ(nearest(R"({"communication": {"timeout": 3}})"), "\"communication.timeout_seconds\"");
  EXPECT_THAT(refusal(R"({"": 1})"), HasSubstr("nearest known key"));
  EXPECT_THAT(refusal("{\n\n\"zero_stages\": 1}"), testing::StartsWith("e.json:3: unknown key \"zero_stages\""));
}

TEST(Config, SizesNeedAUnit) {
  for (const char* value : {"256", "5e8", "-5", "0.5"})
    EXPECT_THAT(refusal(std::string(R"({"budget": {"host": )") + value + "}}"),
                AllOf(HasSubstr("budget.host"), HasSubstr(std::string(value) + " of what?")));
  for (const char* value : {R"("256")", R"("-5MiB")", R"("1 gib")", R"("")", R"("MiB")", R"("1e3MiB")", R"("0x10MiB")",
                            R"("9999999999TiB")", "null", "true", "[1]", R"(["1GiB"])"})
    EXPECT_THAT(refusal(std::string(R"({"budget": {"host": )") + value + "}}"),
                AllOf(HasSubstr("budget.host must be a size with a unit")))
        << value;
  EXPECT_THAT(refusal(R"({"budget": {"device": "0MiB"}})"), HasSubstr("budget.device must be above 0"));
}

TEST(Config, WholeNumbersAreTakenExactlyOrNotAtAll) {
  const auto depth = [](const std::string& text) {
    return Config::from_json(R"({"nvme": {"queue_depth": )" + text + "}}").nvme.queue_depth;
  };
  EXPECT_EQ(depth("32"), 32u);
  EXPECT_EQ(depth("32.0"), 32u);
  EXPECT_EQ(depth("3.2e1"), 32u);
  EXPECT_EQ(depth("4e3"), 4000u);
  EXPECT_EQ(depth("320e-1"), 32u);
  for (const char* value : {"1.5", "0", "-1", "4097", "1e30", "1e300", "9007199254740993", "18446744073709551617",
                            "\"5e8\"", "\"32\"", "true", "null", "[1]", "{}", "\"auto\""})
    EXPECT_THAT(refusal(std::string(R"({"nvme": {"queue_depth": )") + value + "}}"),
                HasSubstr("nvme.queue_depth must be a whole number from 1 to 4096, not "))
        << value;
  EXPECT_THAT(refusal(R"({"threads": 1.5})"), HasSubstr("threads must be a whole number"));
  EXPECT_THAT(refusal(R"({"threads": 0})"), HasSubstr("threads"));
  EXPECT_THAT(refusal(R"({"threads": "all"})"), HasSubstr("threads must be \"auto\""));
  EXPECT_THAT(refusal(R"({"zero_stage": 4})"), HasSubstr("zero_stage"));
}

TEST(Config, SenselessHyperParametersAreRefusedWithKeyAndRange) {
  const auto optimizer = [](const std::string& text) { return refusal(R"({"optimizer": {)" + text + "}}"); };
  for (const char* value : {"-1", "-1e-300", "1e39", "\"0.1\"", "true", "null"})
    EXPECT_THAT(optimizer(std::string("\"learning_rate\": ") + value), HasSubstr("optimizer.learning_rate must be"))
        << value;
  EXPECT_EQ(optimizer("\"learning_rate\": 1e400"),
            "e.json:1: \"learning_rate\" cannot be that: the number 1e400 is too large, above 1.8e308");
  EXPECT_THAT(optimizer("\"epsilon\": 1e-400"),
              HasSubstr("must be 0 or further from 0 than 1e-307, not the number 1e-400"));
  EXPECT_THAT(optimizer("\"betas\": [0.9, -1e999]"), HasSubstr("the number -1e999 is too large"));
  EXPECT_THAT(refusal("1e400"), HasSubstr("e.json:1: the number 1e400 is too large"));
  EXPECT_EQ(optimizer("\"learning_rate\": 0"), "accepted");
  for (const char* value : {"[0.9, 1.0]", "[-0.1, 0.9]", "[2, 0.9]", "[0.9, 1.5]"})
    EXPECT_THAT(optimizer(std::string("\"betas\": ") + value), HasSubstr("optimizer.betas must be two numbers from 0"))
        << value;
  for (const char* value : {"0.9", "[0.9]", "[0.9, 0.9, 0.9]", "[]", "null"})
    EXPECT_THAT(optimizer(std::string("\"betas\": ") + value), HasSubstr("optimizer.betas must be a list of two"))
        << value;
  for (const char* value : {"-1", "0"})
    EXPECT_THAT(optimizer(std::string("\"epsilon\": ") + value), HasSubstr("optimizer.epsilon must be")) << value;
  EXPECT_THAT(optimizer("\"weight_decay\": -0.1"), HasSubstr("optimizer.weight_decay must be"));
  for (const char* value : {"0", "-1", "\"none\"", "false"})
    EXPECT_THAT(optimizer(std::string("\"clip_global_norm\": ") + value),
                HasSubstr("optimizer.clip_global_norm must be"))
        << value;
  EXPECT_THAT(optimizer("\"type\": \"sgd\""), HasSubstr("optimizer.type must be one of \"adam\", \"adamw\""));
  for (const char* value : {"0", "-2", "1e300", "\"auto\"", "null", "true"})
    EXPECT_THAT(refusal(std::string("{\"loss_scale\": ") + value + "}"), HasSubstr("loss_scale must be")) << value;
  for (const char* value : {"0", "-1", "1e8"})
    EXPECT_THAT(refusal(std::string("{\"communication\": {\"timeout_seconds\": ") + value + "}}"),
                HasSubstr("communication.timeout_seconds must be"))
        << value;
}

TEST(Config, ValuesSetByHandAreCheckedToo) {
  const auto with = [](const std::function<void(Config&)>& change) {
    Config config;
    change(config);
    return refusal([&] { config.validate(); });
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(with([](Config&) {}), "accepted");
  EXPECT_THAT(with([&](Config& c) { c.optimizer.learning_rate = nan; }), HasSubstr("optimizer.learning_rate"));
  EXPECT_THAT(with([&](Config& c) { c.optimizer.beta1 = nan; }), HasSubstr("optimizer.betas"));
  EXPECT_THAT(with([&](Config& c) { c.optimizer.epsilon = infinity; }), HasSubstr("optimizer.epsilon"));
  EXPECT_THAT(with([&](Config& c) { c.optimizer.weight_decay = nan; }), HasSubstr("optimizer.weight_decay"));
  EXPECT_THAT(with([&](Config& c) { c.optimizer.clip_global_norm = nan; }), HasSubstr("optimizer.clip_global_norm"));
  EXPECT_THAT(with([&](Config& c) {
                c.loss_scale = {Config::LossScale::Kind::dynamic, infinity};
              }),
              HasSubstr("loss_scale"));
  EXPECT_THAT(with([&](Config& c) { c.precision.gradients = DataType::fp16; }), HasSubstr("precision.gradients"));
  EXPECT_THAT(with([&](Config& c) { c.threads = -1; }), HasSubstr("threads"));
  EXPECT_THAT(with([&](Config& c) { c.zero_stage = 9; }), HasSubstr("zero_stage"));
  EXPECT_THAT(with([&](Config& c) { c.nvme.paths.clear(); }), HasSubstr("nvme.paths"));
  EXPECT_THAT(with([&](Config& c) { c.nvme.paths = {"a", "b/../a/"}; }), HasSubstr("twice"));
  EXPECT_THAT(with([&](Config& c) { c.nvme.paths = {std::string("a\0b", 3)}; }), HasSubstr("zero byte"));
  EXPECT_THAT(with([&](Config& c) { c.nvme.queue_depth = 0; }), HasSubstr("nvme.queue_depth"));
}

TEST(Config, BlockSizesAreWholePagesUpToOneGibibyte) {
  const auto block = [](const std::string& size) { return refusal(R"({"nvme": {"block_size": ")" + size + "\"}}"); };
  for (const char* size : {"4KiB", "128KiB", "12KiB", "1GiB"}) EXPECT_EQ(block(size), "accepted") << size;
  for (const char* size : {"0B", "512B", "1000KB", "5000B", "2GiB", "1025MiB"})
    EXPECT_THAT(block(size), HasSubstr("nvme.block_size must be a multiple of 4KiB")) << size;
}

TEST(Config, EagerTimingExcludesWhatNeedsTheWholeGradientFirst) {
  EXPECT_THAT(refusal(R"({"optimizer": {"timing": "eager"}})"),
              AllOf(HasSubstr("optimizer.timing"), HasSubstr("optimizer.clip_global_norm")));
  EXPECT_THAT(refusal(R"({"optimizer": {"timing": "eager", "clip_global_norm": null}, "loss_scale": "dynamic"})"),
              AllOf(HasSubstr("optimizer.timing"), HasSubstr("loss_scale")));
  EXPECT_EQ(refusal(R"({"optimizer": {"timing": "eager", "clip_global_norm": null}, "loss_scale": 2})"), "accepted");
}

TEST(Config, WhatThisBuildLacksIsNamedWithWhatToUseInstead) {
  EXPECT_THAT(refusal(R"({"precision": {"moments": "int4"}})"),
              AllOf(HasSubstr("precision.moments"), HasSubstr("int8")));
  EXPECT_THAT(refusal(R"({"durability": "always"})"), AllOf(HasSubstr("durability"), HasSubstr("\"step\"")));
  EXPECT_THAT(refusal(R"({"durability": {"every": 0}})"), HasSubstr("durability.every"));
  EXPECT_EQ(refusal(R"({"communication": {"backend": "mpi"}})"), "accepted");  // so is whether it is built in
  EXPECT_THAT(refusal(R"({"communication": {"backend": "gloo"}})"), HasSubstr("communication.backend must be one of"));
  EXPECT_THAT(refusal(R"({"communication": {"shard_group_size": -1}})"), HasSubstr("shard_group_size"));
  EXPECT_EQ(refusal(R"({"device": "cuda"})"), "accepted");  // whether there is one, the engine finds out
  EXPECT_THAT(refusal(R"({"device": "gpu"})"), HasSubstr("device must be one of"));
  EXPECT_EQ(refusal(R"({"placement": {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"}})"), "accepted");
}

TEST(Config, AnExplicitPlacementNamesAllThreeStates) {
  EXPECT_THAT(refusal(R"({"placement": {"parameters": "nvme", "optimizer": "nvme"}})"),
              HasSubstr("placement.gradients is missing"));
  EXPECT_THAT(refusal(R"({"placement": "nvme"})"), HasSubstr("placement must be \"auto\" or an object"));
  EXPECT_THAT(refusal(R"({"placement": {"parameters": "disk"}})"),
              HasSubstr("placement.parameters must be one of \"device\", \"host\", \"nvme\", not the string \"disk\""));
}

TEST(Config, HardJsonIsAnErrorWithItsPlace) {
  EXPECT_THAT(refusal(""), HasSubstr("e.json:1:1: not JSON"));
  EXPECT_THAT(refusal("{\"zero_stage\": 3,"), HasSubstr("e.json:1:"));
  EXPECT_THAT(refusal("{\n  \"zero_stage\": 3,\n}"), HasSubstr("e.json:3:1: not JSON"));
  EXPECT_THAT(refusal("{} {}"), HasSubstr("not JSON"));
  EXPECT_THAT(refusal("\xEF\xBB\xBF{}"), HasSubstr("byte-order mark"));
  EXPECT_THAT(refusal("{\"device\": \"\xff\xfe\"}"), HasSubstr("not JSON"));
  EXPECT_THAT(refusal("{\"device\": \"\xed\xa0\x80\"}"), HasSubstr("not JSON"));
  EXPECT_THAT(refusal("// a comment\n{}"), HasSubstr("not JSON"));
  EXPECT_THAT(refusal("{\"threads\": 2 /* two */}"), HasSubstr("not JSON"));
  for (const char* value : {"NaN", "Infinity", "-Infinity", "nan", "+1", "01", ".5", "1.", "0x1", "1e"})
    EXPECT_THAT(refusal(std::string("{\"loss_scale\": ") + value + "}"), HasSubstr("not JSON")) << value;
  EXPECT_THAT(refusal("{\"threads\": 1,\n\"threads\": 2}"), HasSubstr("e.json:2: the key \"threads\" is there twice"));
  EXPECT_THAT(refusal(R"({"nvme": {"paths": ["a"], "paths": ["b"]}})"), HasSubstr("\"paths\" is there twice"));
  for (const char* text : {"[]", "3", "\"x\"", "null"})
    EXPECT_THAT(refusal(text), HasSubstr("the configuration must be an object")) << text;
  EXPECT_THAT(refusal(R"({"budget": "8GiB"})"), HasSubstr("budget must be an object of keys"));
}

TEST(Config, NeitherDepthNorSizeCrashesTheReader) {
  const std::string brackets(1'000'000, '[');
  EXPECT_THAT(refusal(brackets), HasSubstr("nested deeper than 32"));
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
  EXPECT_THAT(refusal(objects), HasSubstr("nested deeper than 32"));
  EXPECT_THAT(refusal(std::string(200'000'000, ' ')), HasSubstr("larger than 1 MiB"));
  std::string keys = "{";
  for (int i = 0; i < 50'000; ++i) keys += "\"k" + std::to_string(i) + "\":0,";
  EXPECT_THAT(refusal(keys), HasSubstr("more than 1000 keys"));
  EXPECT_THAT(refusal("{\"device\": \"" + std::string(900'000, 'x')), HasSubstr("not JSON"));
  EXPECT_THAT(refusal("{\"" + std::string(900'000, 'x') + "\": 1}"), HasSubstr("unknown key"));
  EXPECT_THAT(refusal("{\"threads\": " + std::string(900'000, '9') + "}"), Not("accepted"));
  EXPECT_THAT(refusal("{\"threads\": 1e" + std::string(900'000, '9') + "}"), Not("accepted"));
  EXPECT_THAT(refusal("{\"zero\\u0000\\nstage\": 1}"), HasSubstr("unknown key \"zero??stage\""));
}

TEST_F(ConfigFile, FilesThatCannotBeReadAreNamed) {
  EXPECT_THAT(refusal([&] { Config::from_file(directory_ + "/absent.json"); }),
              AllOf(HasSubstr("absent.json"), HasSubstr("No such file")));
  EXPECT_THAT(refusal([&] { Config::from_file(directory_); }), HasSubstr("Is a directory"));
  EXPECT_THAT(refusal([&] { Config::from_file(write("")); }), HasSubstr("e.json:1:1"));
  EXPECT_THAT(refusal([&] { Config::from_file("/dev/zero"); }), HasSubstr("larger than 1 MiB"));
}

TEST_F(ConfigFile, OverridesTakeDottedKeysAndJsonOrText) {
  const Config config = load(R"({"placement": "auto", "optimizer": {"timing": "auto"}, "nvme": {"paths": ["run"]}})",
                             {{"budget.host", "256MiB"},
                              {"nvme.paths", "/a,/b"},
                              {"optimizer.clip_global_norm", "null"},
                              {"optimizer.betas", "[0.8, 0.9]"},
                              {"threads", "2"},
                              {"placement", R"({"parameters":"host","gradients":"host","optimizer":"host"})"},
                              {"placement.optimizer", "nvme"},
                              {"optimizer.timing", "eager"}});
  EXPECT_EQ(config.budget.host_bytes, std::uint64_t{256} << 20);
  EXPECT_THAT(config.nvme.paths, testing::ElementsAre("/a", "/b"));
  EXPECT_FALSE(config.optimizer.clip_global_norm.has_value());
  EXPECT_EQ(config.optimizer.beta1, 0.8);
  EXPECT_EQ(config.threads, 2);
  EXPECT_EQ(config.placement.parameters, Tier::host);
  EXPECT_EQ(config.placement.optimizer, Tier::nvme);
  EXPECT_EQ(config.optimizer.timing, Timing::eager);
  EXPECT_THAT(load("{}", {{"nvme.paths", "[\"/x\"]"}}).nvme.paths, testing::ElementsAre("/x"));
  EXPECT_THAT(load("{}", {{"nvme.paths", "/x"}}).nvme.paths, testing::ElementsAre("/x"));
  EXPECT_THAT(load("{}", {{"nvme.paths", "\"/x,y\""}}).nvme.paths, testing::ElementsAre("/x,y"));
  EXPECT_THAT(load("{}", {{"nvme.paths", "7"}}).nvme.paths, testing::ElementsAre("7"));
  EXPECT_THAT(load("{}", {{"nvme.paths", "1e400"}}).nvme.paths, testing::ElementsAre("1e400"));
  EXPECT_EQ(load("{}", {{"threads", "1"}, {"threads", "5"}}).threads, 5);
  EXPECT_FALSE(load("{\"threads\": 3}", {{"threads", "auto"}}).threads.has_value());
}

TEST_F(ConfigFile, WrongOverridesNameTheOption) {
  EXPECT_THAT(set_refusal("budget.host", "-5"), AllOf(HasSubstr("--set budget.host=-5"), HasSubstr("of what?")));
  EXPECT_THAT(set_refusal("budget.hosts", "1GiB"),
              AllOf(HasSubstr("--set budget.hosts"), HasSubstr("\"budget.host\"")));
  EXPECT_THAT(set_refusal("host", "1GiB"), HasSubstr("\"budget.host\""));
  EXPECT_THAT(set_refusal("optimizer.betas", "[0.9,1.5]"), HasSubstr("optimizer.betas"));
  EXPECT_THAT(set_refusal("optimizer.learning_rate", "NaN"), HasSubstr("optimizer.learning_rate must be a number"));
  EXPECT_THAT(set_refusal("optimizer.learning_rate", "1e400"),
              AllOf(HasSubstr("--set optimizer.learning_rate=1e400: optimizer.learning_rate cannot be that"),
                    HasSubstr("the number 1e400 is too large")));
  EXPECT_THAT(set_refusal("optimizer.betas", "[0.9,1e400]"), HasSubstr("the number 1e400 is too large"));
  EXPECT_THAT(set_refusal("nvme.paths", ""), HasSubstr("nvme.paths"));
  EXPECT_THAT(set_refusal("nvme.paths", "{\"a\": 1}"), HasSubstr("list of directories"));
  EXPECT_THAT(set_refusal("nvme.paths", "/a,,/b"), HasSubstr("empty path"));
  EXPECT_THAT(set_refusal("", "1"), HasSubstr("unknown key"));
  EXPECT_THAT(set_refusal("budget", "8GiB"), HasSubstr("budget must be an object"));
  EXPECT_THAT(set_refusal("threads", "two\nlines"), HasSubstr("threads"));
}

TEST_F(ConfigFile, ShippedConfigurationsLoad) {
  const std::string folder = std::string(BALLAST_SOURCE_DIR) + "/configs/engine/";
  const Config nvme = Config::from_file(folder + "nvme.json");
  EXPECT_EQ(nvme.placement.parameters, Tier::nvme);
  EXPECT_EQ(nvme.placement.optimizer, Tier::nvme);
  EXPECT_EQ(nvme.placement.gradients, Tier::host);
  EXPECT_EQ(nvme.optimizer.clip_global_norm, 1.0);
  EXPECT_EQ(Config::from_file(folder + "in-memory.json").placement.optimizer, Tier::device);
  EXPECT_EQ(Config::from_file(folder + "host.json").placement.optimizer, Tier::host);
  EXPECT_TRUE(Config::from_file(folder + "auto.json").placement.automatic);
  for (const char* name : {"cuda.json", "cuda-nvme.json", "cuda-in-memory.json"}) {
    EXPECT_EQ(Config::from_file(folder + name).device, "cuda") << name;
  }
  EXPECT_EQ(Config::from_file(folder + "cuda.json").placement.optimizer, Tier::host);
  EXPECT_EQ(Config::from_file(folder + "cuda-nvme.json").placement.optimizer, Tier::nvme);
}

TEST_F(ConfigFile, EveryShippedConfigurationIsValidAndNamesEveryKey) {
  const std::string folder = std::string(BALLAST_SOURCE_DIR) + "/configs/engine";
  std::size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    SCOPED_TRACE(entry.path().string());
    ASSERT_EQ(entry.path().extension(), ".json");
    const Config config = Config::from_file(entry.path().string());
    config.validate();
    EXPECT_GT(config.budget.device_bytes, 0u);
    EXPECT_GT(config.budget.host_bytes, 0u);
    EXPECT_FALSE(config.nvme.paths.empty());
    // What a reader would look for: each key of the outer object is spelt out.
    std::ifstream in(entry.path());
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    for (const char* key : {"zero_stage", "device", "budget", "nvme", "placement", "precision", "optimizer",
                            "loss_scale", "durability", "threads", "communication"}) {
      EXPECT_THAT(text, HasSubstr('"' + std::string(key) + "\":"));
    }
    ++files;
  }
  EXPECT_GE(files, 7u);
}

}  // namespace
}  // namespace ballast
