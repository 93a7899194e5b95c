// `ballast train` on token files, on several files, and with validation.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "command_runner.h"

namespace ballast::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Arguments = std::vector<std::string>;
using Json = nlohmann::json;

template <typename Token>
std::string raw(const std::vector<Token>& tokens) {
  return std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(Token));
}

class TrainingData : public ::testing::Test {
 protected:
  static Arguments with(const std::string& model, const Arguments& data, const Arguments& more) {
    Arguments all = {"train",      "--model", model,     "--engine", source_path("configs/engine/host.json"),
                     "--sequence", "16",      "--batch", "2"};
    if (std::find(more.begin(), more.end(), "--steps") == more.end()) all.insert(all.end(), {"--steps", "4"});
    for (const std::string& each : data) all.insert(all.end(), {"--data", each});
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  Json figures(const std::string& model, const Arguments& data, Arguments more = {}) const {
    const std::string path = scratch_.path() + "/out.json";
    more.insert(more.end(), {"--json", path});
    const CommandResult result = run_command(with(model, data, more));
    EXPECT_EQ(result.status, 0) << result.error;
    Json json = Json::parse(read_file(path), nullptr, false);
    EXPECT_FALSE(json.is_discarded());
    std::filesystem::remove(path);
    return json;
  }

  ScratchFolder scratch_;
  const std::string tiny_ = source_path("configs/models/gpt-tiny.json");
  // Of 300 ids: more than a byte can be.
  const std::string wide_ =
      scratch_.write("wide.json",
                     R"({"type": "gpt", "layers": 1, "width": 32, "heads": 2, "context": 32, "vocabulary": 300,
          "tie_embeddings": true})");
  std::string text_ = [] {
    std::string text;
    for (int i = 0; i < 400; ++i) text += "line " + std::to_string(i * 7919) + " of the text\n";
    return text;
  }();
  std::string bytes_ = scratch_.write("text", text_);
};

TEST_F(TrainingData, TheSameIdsGiveTheSameLossesAtEveryWidth) {
  const std::vector<std::uint16_t> ids(text_.begin(), text_.end());
  const std::vector<std::uint32_t> wide(text_.begin(), text_.end());
  std::vector<std::uint32_t> numbers(256, 0);
  numbers[0] = 20240520;
  numbers[1] = 1;
  numbers[2] = static_cast<std::uint32_t>(ids.size());
  const Json bytes = figures(tiny_, {bytes_});
  EXPECT_EQ(bytes["tokens"], "u8");
  EXPECT_EQ(figures(tiny_, {scratch_.write("u16", raw(ids))}, {"--tokens", "u16"})["losses"], bytes["losses"]);
  EXPECT_EQ(figures(tiny_, {scratch_.write("u32", raw(wide))}, {"--tokens", "u32"})["losses"], bytes["losses"]);
  const std::string headed = scratch_.write("headed", raw(numbers) + raw(ids));
  EXPECT_EQ(figures(tiny_, {headed}, {"--tokens", "u16"})["losses"], bytes["losses"]);
  const Json recognised = figures(tiny_, {headed});
  EXPECT_EQ(recognised["losses"], bytes["losses"]);
  EXPECT_EQ(recognised["tokens"], "u16");
}

TEST_F(TrainingData, IdsBeyondAByteAreLearnt) {
  std::vector<std::uint16_t> ids;
  for (int i = 0; i < 4000; ++i) ids.push_back(static_cast<std::uint16_t>(256 + i % 40));
  const Json json = figures(wide_, {scratch_.write("u16", raw(ids))},
                            {"--tokens", "u16", "--steps", "60", "--learning-rate", "0.01"});
  EXPECT_NEAR(json["losses"][0].get<double>(), 5.70, 0.3) << "ln 300, of a model that knows nothing";
  EXPECT_LT(json["losses"][59].get<double>(), 3.0);
}

TEST_F(TrainingData, AnIdBeyondTheVocabularyEndsItBeforeTheFirstStep) {
  std::vector<std::uint16_t> ids(5000, 1);
  ids[4321] = 300;
  const std::string file = scratch_.write("u16", raw(ids));
  const CommandResult result = run_command(with(wide_, {file}, {"--tokens", "u16"}));
  EXPECT_EQ(result.status, 2);
  EXPECT_THAT(result.error, AllOf(HasSubstr(file + ": token 4321 "), HasSubstr("is 300"), HasSubstr("vocabulary")));
}

TEST_F(TrainingData, SeveralFilesAreNamedOneByOneOrWithCommas) {
  const std::string first = scratch_.write("a", text_.substr(0, 3000)),
                    second = scratch_.write("b", text_.substr(3000));
  const Json repeated = figures(tiny_, {first, second});
  EXPECT_EQ(repeated["data"], first + "," + second);
  EXPECT_EQ(figures(tiny_, {first + "," + second})["losses"], repeated["losses"]);
  EXPECT_NE(figures(tiny_, {bytes_})["losses"], repeated["losses"]);
  const std::string comma = scratch_.write("x,y", text_);
  EXPECT_EQ(figures(tiny_, {comma})["data"], comma) << "a file of that very name is one file";
  const CommandResult missing = run_command(with(tiny_, {first + "," + scratch_.path() + "/none"}, {}));
  EXPECT_EQ(missing.status, 2);
  EXPECT_THAT(missing.error, HasSubstr("/none: the data file cannot be opened"));
}

TEST_F(TrainingData, ValidationChangesNothingOfTheTraining) {
  const std::string held = scratch_.write("held", text_.substr(2000, 3000));
  for (const char* timing : {"eager", "just_in_time"}) {
    const Arguments engine = {"--set", std::string("optimizer.timing=") + timing, "--set",
                              "optimizer.clip_global_norm=null"};
    const Json plain = figures(tiny_, {bytes_}, engine);
    EXPECT_THAT(plain["validation_losses"], ::testing::IsEmpty());
    Arguments validated = engine;
    validated.insert(validated.end(),
                     {"--validate-every", "2", "--validation-data", held, "--validation-batches", "2"});
    const Json json = figures(tiny_, {bytes_}, validated);
    EXPECT_EQ(json["losses"], plain["losses"]) << timing;
    EXPECT_EQ(json["grad_norms"], plain["grad_norms"]) << timing;
    EXPECT_THAT(json["validation_steps"], ElementsAre(2, 4));
    ASSERT_EQ(json["validation_losses"].size(), 2u);
    EXPECT_LT(json["validation_losses"][1].get<double>(), json["validation_losses"][0].get<double>());
    EXPECT_EQ(figures(tiny_, {bytes_}, validated)["validation_losses"], json["validation_losses"]);
  }
}

TEST_F(TrainingData, ValidationLossesAreTheModelsOwnOnThatData) {
  // Validated on one line repeated, a model that was trained on it for long is nearly sure of it, unlike on other text.
  std::string line;
  for (int i = 0; i < 300; ++i) line += "abcdefgh";
  const std::string same = scratch_.write("same", line);
  const Arguments more = {"--steps", "40", "--learning-rate", "0.003", "--validate-every", "40", "--validation-data"};
  const auto with_data = [&](const std::string& data) {
    Arguments all = more;
    all.push_back(data);
    return figures(tiny_, {same}, all)["validation_losses"][0].get<double>();
  };
  EXPECT_LT(with_data(same), 0.3);
  EXPECT_GT(with_data(bytes_), 2.0);
}

TEST_F(TrainingData, ASplitIsKeptOutOfTraining) {
  // The last part is of one letter only, which a model that never saw it gives no chance.
  const std::string file = scratch_.write("mixed", std::string(3600, 'a') + std::string(400, 'z'));
  const Arguments more = {"--steps",          "30", "--learning-rate",    "0.003",
                          "--validate-every", "30", "--validation-split", "0.1"};
  const Json json = figures(tiny_, {file}, more);
  EXPECT_LT(json["losses"][29].get<double>(), 0.2);
  EXPECT_GT(json["validation_losses"][0].get<double>(), 4.0);
}

TEST_F(TrainingData, TheLogTellsTheValidationLossInItsStepsLine) {
  const std::string log = scratch_.path() + "/log";
  const Json json = figures(tiny_, {bytes_}, {"--validate-every", "3", "--log", log});
  std::istringstream lines(read_file(log));
  std::vector<Json> parsed;
  for (std::string line; std::getline(lines, line);) parsed.push_back(Json::parse(line));
  ASSERT_EQ(parsed.size(), 4u);
  EXPECT_EQ(parsed[2]["validation_loss"], json["validation_losses"][0]);
  EXPECT_FALSE(parsed[0].contains("validation_loss"));
  EXPECT_FALSE(parsed[3].contains("validation_loss"));
}

TEST_F(TrainingData, SenselessRequestsAreRefused) {
  const auto refusal = [&](const Arguments& more) {
    const CommandResult result = run_command(with(tiny_, {bytes_}, more));
    EXPECT_EQ(result.status, 2) << result.error;
    return result.error;
  };
  EXPECT_THAT(refusal({"--validation-data", bytes_}), HasSubstr("--validate-every N"));
  EXPECT_THAT(refusal({"--validate-every", "1", "--validation-data", bytes_, "--validation-split", "0.1"}),
              HasSubstr("exclude each other"));
  EXPECT_THAT(refusal({"--validate-every", "1", "--validation-split", "0.001"}), HasSubstr("of its split are too few"));
  EXPECT_THAT(refusal({"--tokens", "u8", "--tokens", "u16"}), ::testing::Not(::testing::IsEmpty()));
  refusal({"--tokens", "u64"});
}

}  // namespace
}  // namespace ballast::testing
