// Model files: what is read, what is refused and how; the units; the text that batches come from.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/random.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "gpt/data.h"
#include "gpt/model.h"
#include "gpt/settings.h"

namespace ballast::gpt {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* kGood =
    R"({"type": "gpt", "layers": 2, "width": 12, "heads": 3, "context": 8, "vocabulary": 256,)"
    R"( "tie_embeddings": false})";

std::string error_of(const std::string& text) {
  try {
    GptShape::from_json(text, "m.json");
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}
std::string with(const std::string& from, const std::string& to) {
  std::string text = kGood;
  text.replace(text.find(from), from.size(), to);
  return text;
}

class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& content) {
    path_ = (std::filesystem::temp_directory_path() /
             ("ballast-gpt-" + std::to_string(getpid()) + "-" + std::to_string(++count_)))
                .string();
    std::ofstream(path_, std::ios::binary) << content;
  }
  ~TemporaryFile() { std::filesystem::remove(path_); }
  const std::string& path() const { return path_; }

 private:
  static inline int count_ = 0;
  std::string path_;
};

TEST(GptShape, ReadsAModelFile) {
  const GptShape shape = GptShape::from_json(kGood);
  EXPECT_EQ(shape, (GptShape{2, 12, 3, 8, 256, false}));
  EXPECT_TRUE(GptShape::from_json(with(", \"tie_embeddings\": false", "")).tie_embeddings);
  EXPECT_EQ(GptShape::from_json(with("12", "1.2e1")).width, 12);  // whole, however it is written
  const TemporaryFile file(kGood);
  EXPECT_EQ(GptShape::from_file(file.path()), shape);
}

TEST(GptShape, RefusesWhatIsNoModelAndSaysWhere) {
  EXPECT_THAT(error_of(""), HasSubstr("m.json: empty"));
  EXPECT_THAT(error_of("{\"type\": \"gpt\",\n  \"layers\" 2"),
              AllOf(HasSubstr("not valid JSON"), HasSubstr("line 2, column 12")));
  EXPECT_THAT(error_of(std::string(kGood) + "x"), HasSubstr("not valid JSON"));
  EXPECT_THAT(error_of(with("false}", "false,}")), HasSubstr("not valid JSON"));
  EXPECT_THAT(error_of("[1]"), HasSubstr("JSON object"));
  EXPECT_THAT(error_of("42"), HasSubstr("JSON object"));
  EXPECT_THAT(error_of(std::string(1'000'000, '[')), HasSubstr("JSON object"));
  EXPECT_THAT(error_of(with("2", "{\"a\": 1}")), HasSubstr("\"layers\" must be a whole number, not an object"));
  EXPECT_THAT(error_of(with("\"layers\": 2", "\"layers\": NaN")), HasSubstr("not valid JSON"));
  EXPECT_THAT(error_of("\xEF\xBB"), HasSubstr("not valid JSON"));
  EXPECT_THAT(error_of(with("gpt", "g\xFFpt")), HasSubstr("not valid JSON"));
}

TEST(GptShape, RefusesUnknownRepeatedAndMissingKeys) {
  EXPECT_THAT(error_of(with("\"layers\"", "\"layer\"")),
              AllOf(HasSubstr("unknown key \"layer\""), HasSubstr("\"layers\"")));
  EXPECT_THAT(error_of(with("\"heads\"", "\"Heads\"")),
              AllOf(HasSubstr("unknown key \"Heads\""), HasSubstr("nearest known one is \"heads\"")));
  EXPECT_THAT(error_of(with("\"heads\": 3", "\"heads\": 3, \"heads\": 3")),
              AllOf(HasSubstr("\"heads\" appears twice"), HasSubstr("line 1")));
  EXPECT_THAT(error_of(with("\"heads\": 3, ", "")), HasSubstr("\"heads\" is missing"));
  EXPECT_THAT(error_of("{}"), HasSubstr("\"type\" is missing"));
}

TEST(GptShape, RefusesValuesOfTheWrongTypeOrRange) {
  for (const char* value : {"1.5", "\"2\"", "true", "null", "[2]", "1e30", "1e400", "99999999999999999999"}) {
    EXPECT_THAT(error_of(with("\"layers\": 2", std::string("\"layers\": ") + value)),
                HasSubstr("\"layers\" must be a whole number"))
        << value;
  }
  EXPECT_THAT(error_of(with("\"gpt\"", "\"bert\"")), HasSubstr("\"type\" is \"bert\""));
  EXPECT_THAT(error_of(with("\"gpt\"", "7")), HasSubstr("\"type\" must be a string"));
  EXPECT_THAT(error_of(with("false", "0")), HasSubstr("\"tie_embeddings\" must be true or false"));
  EXPECT_THAT(error_of(with("\"layers\": 2", "\"layers\": 0")), HasSubstr("\"layers\" is 0; it must be from 1"));
  EXPECT_THAT(error_of(with("\"layers\": 2", "\"layers\": -1")), HasSubstr("\"layers\" is -1"));
  EXPECT_THAT(error_of(with("12", "13")), AllOf(HasSubstr("\"width\" 13"), HasSubstr("\"heads\" 3")));
  EXPECT_THAT(error_of(with("\"heads\": 3", "\"heads\": 13")), HasSubstr("\"heads\" is 13"));
  EXPECT_THAT(error_of(with("12", "999999999")), HasSubstr("\"width\" is 999999999"));
  EXPECT_THAT(error_of(with("\"vocabulary\": 256", "\"vocabulary\": 0")), HasSubstr("\"vocabulary\" is 0"));
}

TEST(GptShape, FileErrorsNameTheFile) {
  for (const char* path : {"/nonexistent/model.json", "/"}) {
    try {
      GptShape::from_file(path);
      ADD_FAILURE() << path << " was read";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr(path));
    }
  }
}

TEST(GptShape, CountsTheParametersOfItsUnits) {
  for (const bool tied : {true, false}) {
    GptShape shape{3, 24, 4, 16, 300, tied};
    std::int64_t count = 0;
    const auto units = gpt_units(shape);
    ASSERT_EQ(units.size(), 5u);
    for (const GptUnit& unit : units) {
      for (const ParameterSpec& p : unit.parameters) {
        std::int64_t elements = 1;
        for (const std::int64_t extent : p.shape) elements *= extent;
        count += elements;
        EXPECT_EQ(p.options.group, p.shape.size() == 2 ? kDecayGroup : kNoDecayGroup) << p.name;
      }
    }
    EXPECT_EQ(shape.parameters(), count);
    EXPECT_EQ(units.front().name, "embedding");
    EXPECT_EQ(units[2].name, "h.1");
    EXPECT_EQ(units.back().name, "final");
    EXPECT_EQ(units.back().parameters.size(), tied ? 2u : 3u);
    EXPECT_EQ(units[1].parameters[block::c_attn_weight].name, "attn.c_attn.weight");
    EXPECT_EQ(units[1].parameters[block::c_attn_weight].shape, (std::vector<std::int64_t>{24, 72}));
    EXPECT_EQ(units[1].parameters[block::mlp_c_proj_bias].name, "mlp.c_proj.bias");
  }
}

TEST(GptShape, ShippedModelsAreValidAndOfTheSizeTheirNamesSay) {
  const std::pair<const char*, double> sizes[] = {{"gpt-tiny", 1e6},   {"gpt-10m", 10e6},   {"gpt2-124m", 124e6},
                                                  {"gpt-303m", 303e6}, {"gpt-350m", 350e6}, {"gpt-1b", 1.3e9},
                                                  {"gpt-7b", 6.7e9},   {"gpt-13b", 13e9},   {"gpt-70b", 70e9},
                                                  {"gpt-175b", 175e9}, {"gpt-1t", 1e12}};
  for (const auto& [name, size] : sizes) {
    const GptShape shape = GptShape::from_file(std::string(BALLAST_MODELS) + "/" + name + ".json");
    EXPECT_NEAR(static_cast<double>(shape.parameters()) / size, 1, 0.1) << name;
    EXPECT_GE(shape.context, 128) << name;
    EXPECT_GE(shape.vocabulary, 256) << name;
  }
  EXPECT_GE(GptShape::from_file(std::string(BALLAST_MODELS) + "/gpt-350m.json").parameters(), 340'000'000);
}

TEST(TrainSettings, RefusesWhatDoesNotFitTheShape) {
  const GptShape shape{2, 12, 3, 8, 256, true};
  const auto error = [&](auto change) {
    TrainSettings settings;
    settings.sequence = 8;
    change(settings);
    try {
      settings.validate(shape);
    } catch (const ConfigError& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(error([](TrainSettings&) {}), "no error");
  EXPECT_THAT(error([](TrainSettings& s) { s.sequence = 9; }),
              AllOf(HasSubstr("--sequence 9"), HasSubstr("context of 8")));
  EXPECT_THAT(error([](TrainSettings& s) { s.sequence = 0; }), HasSubstr("--sequence is 0"));
  EXPECT_THAT(error([](TrainSettings& s) { s.batch = -3; }), HasSubstr("--batch is -3"));
  EXPECT_THAT(error([](TrainSettings& s) { s.micro_batches = 0; }), HasSubstr("--micro-batches is 0"));
  EXPECT_THAT(error([](TrainSettings& s) { s.micro_batches = 3; }),
              AllOf(HasSubstr("--batch 4"), HasSubstr("3 micro-batches")));
  EXPECT_THAT(error([](TrainSettings& s) { s.batch = std::int64_t{1} << 40; }), HasSubstr("tokens"));
  EXPECT_THAT(error([](TrainSettings& s) { s.world_size = 3; }), HasSubstr("3 ranks"));
}

TEST(TokenData, RefusesPathsThatAreNoTextAndSequencesThatDoNotFit) {
  const TemporaryFile empty(""), text("0123456789");
  for (const std::string& path :
       {std::string("/nonexistent/text"), std::string("/"), empty.path(), std::string("/dev/null")}) {
    try {
      TokenData::open(path);
      ADD_FAILURE() << path << " was opened";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr(path));
    }
  }
  const auto data = TokenData::open(text.path());
  data->require_sequence(9);
  try {
    data->require_sequence(10);
    ADD_FAILURE() << "ten bytes hold no sequence of ten and the next";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr(text.path()), HasSubstr("10 bytes"), HasSubstr("--sequence 9")));
  }
}

TEST(TokenData, DrawsFromTheWholeTextByCountersAlone) {
  const TemporaryFile file("0123456789");
  const auto data = TokenData::open(file.path());
  std::vector<bool> seen(7, false);
  for (std::uint64_t step = 0; step < 100; ++step) {
    const std::uint64_t at = data->sequence_offset(1, step, 2, 4);
    ASSERT_LE(at, 5u);  // the last start whose next byte is there
    seen[at] = true;
    EXPECT_EQ(at, data->sequence_offset(1, step, 2, 4));
  }
  for (std::size_t i = 0; i <= 5; ++i) EXPECT_TRUE(seen[i]) << i;
  std::uint32_t bytes[4];
  data->read(3, bytes, 256);
  EXPECT_EQ(std::string(bytes, bytes + 4), "3456");
}

TEST(TokenData, AFileCutShortIsAnErrorWithFileAndOffset) {
  const TemporaryFile file("0123456789");
  const auto data = TokenData::open(file.path());
  std::filesystem::resize_file(file.path(), 5);
  std::uint32_t bytes[4];
  try {
    data->read(3, bytes, 256);
    ADD_FAILURE() << "read past the end";
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr(file.path()), HasSubstr("offset 5")));
  }
}

// --- token files -----------------------------------------------------------------------------------------------------

template <typename Token>
std::string raw(const std::vector<Token>& tokens) {
  return std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(Token));
}
// llm.c's: 256 numbers of 32 bits, of which the first three say what follows.
std::string header(std::uint32_t magic, std::uint32_t version, std::size_t tokens) {
  std::vector<std::uint32_t> numbers(256, 0);
  numbers[0] = magic;
  numbers[1] = version;
  numbers[2] = static_cast<std::uint32_t>(tokens);
  return raw(numbers);
}
std::vector<std::uint32_t> all_of(const TokenData& data) {
  std::vector<std::uint32_t> tokens(data.tokens());
  data.read(0, tokens, std::int64_t{1} << 32);
  return tokens;
}
std::string refusal(const std::vector<std::string>& paths, std::optional<TokenType> type,
                    std::int64_t vocabulary = std::int64_t{1} << 32) {
  try {
    TokenData::open(paths, type, {})->require_below(vocabulary);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(TokenData, ReadsTheIdsThatNanoGptWrites) {
  const std::vector<std::uint16_t> ids = {0, 255, 256, 50256, 65535, 7};
  const TemporaryFile file(raw(ids));
  const auto data = TokenData::open({file.path()}, TokenType::u16, {});
  EXPECT_THAT(all_of(*data), ::testing::ElementsAreArray(ids));
  const std::vector<std::uint32_t> wide = {1, 70000, 128255};
  const TemporaryFile wide_file(raw(wide));
  EXPECT_EQ(all_of(*TokenData::open({wide_file.path()}, TokenType::u32, {})), wide);
}

TEST(TokenData, RecognisesTheHeadersOfLlmC) {
  const std::vector<std::uint16_t> ids = {50256, 1, 2, 3};
  const TemporaryFile file(header(20240520, 1, 4) + raw(ids));
  for (const std::optional<TokenType> type : {std::optional<TokenType>(), std::optional(TokenType::u16)}) {
    const auto data = TokenData::open({file.path()}, type, {});
    EXPECT_EQ(data->type(), TokenType::u16);
    EXPECT_THAT(all_of(*data), ::testing::ElementsAreArray(ids));
  }
  EXPECT_EQ(TokenData::open({file.path()}, TokenType::u8, {})->tokens(), 1032u) << "bytes where that is asked for";
  const std::vector<std::uint32_t> wide = {128000, 5};
  const TemporaryFile llama(header(20240801, 7, 2) + raw(wide));
  EXPECT_EQ(all_of(*TokenData::open({llama.path()}, {}, {})), wide);
}

TEST(TokenData, RefusesHeadersThatContradictTheirFile) {
  const std::vector<std::uint16_t> ids = {1, 2, 3};
  const TemporaryFile cut(header(20240520, 1, 4) + raw(ids)), newer(header(20240520, 2, 3) + raw(ids)), odd("abc");
  EXPECT_THAT(refusal({cut.path()}, TokenType::u16),
              AllOf(HasSubstr(cut.path()), HasSubstr("its header says 4 tokens"), HasSubstr("6 bytes follow")));
  EXPECT_THAT(refusal({newer.path()}, TokenType::u16), HasSubstr("version 2"));
  EXPECT_THAT(refusal({odd.path()}, TokenType::u16), HasSubstr("3 bytes are no whole number of tokens of 2"));
  const TemporaryFile whole(header(20240520, 1, 3) + raw(ids)), plain("plain text");
  EXPECT_THAT(refusal({whole.path(), plain.path()}, {}), HasSubstr("name files of one kind, or say --tokens"));
}

TEST(TokenData, AnIdBeyondTheVocabularyIsNamedWithFileAndPosition) {
  std::vector<std::uint16_t> ids(300000, 5);
  ids[290000] = 50257;
  const TemporaryFile good(raw(std::vector<std::uint16_t>{1, 2})), bad(raw(ids));
  EXPECT_THAT(
      refusal({good.path(), bad.path()}, TokenType::u16, 50257),
      AllOf(HasSubstr(bad.path() + ": token 290000 "), HasSubstr("is 50257"), HasSubstr("vocabulary of 50257")));
  EXPECT_EQ(refusal({good.path(), bad.path()}, TokenType::u16, 50258), "accepted");
  const auto data = TokenData::open({good.path(), bad.path()}, TokenType::u16, {});
  std::vector<std::uint32_t> some(10);
  EXPECT_THROW(data->read(2 + 289995, some, 50257), ConfigError);
  data->read(2 + 289990, some, 50257);
}

TEST(TokenData, SequencesNeverCrossFromOneFileIntoTheNext) {
  const TemporaryFile first("aaaaa"), second("bbbbbbb"), third("ccc");
  const auto data = TokenData::open({first.path(), second.path(), third.path()}, {}, {});
  EXPECT_EQ(data->tokens(), 15u);
  std::set<std::uint64_t> seen;
  for (std::uint64_t step = 0; step < 400; ++step) {
    const std::uint64_t at = data->sequence_offset(3, step, 0, 2);
    std::uint32_t tokens[3];
    data->read(at, tokens, 256);
    EXPECT_TRUE(tokens[0] == tokens[1] && tokens[1] == tokens[2]) << at;
    seen.insert(at);
  }
  EXPECT_THAT(seen, ::testing::ElementsAre(0, 1, 2, 5, 6, 7, 8, 9, 12)) << "every place where three fit";
  EXPECT_THROW(data->require_sequence(3), ConfigError);
}

TEST(TokenData, OfOneFileOfBytesTheSequencesAreThoseOfBefore) {
  // Runs that were saved when there was one file only must go on with the sequences they had.
  const TemporaryFile file("0123456789");
  const auto data = TokenData::open(file.path());
  for (std::uint64_t row = 0; row < 8; ++row)
    EXPECT_EQ(data->sequence_offset(1, 2, row, 4), base::random_at(base::random_at(1, 2), row) % 6);
}

TEST(TokenData, ASplitSharesTheTokensOutWithoutOverlap) {
  const TemporaryFile file("0123456789");
  const auto rest = TokenData::open({file.path()}, {}, {.held_out = 0.3, .of_held_out = false});
  const auto held = TokenData::open({file.path()}, {}, {.held_out = 0.3, .of_held_out = true});
  EXPECT_EQ(rest->tokens(), 7u);
  EXPECT_EQ(held->tokens(), 3u);
  EXPECT_THAT(all_of(*held), ::testing::ElementsAre('7', '8', '9'));
  EXPECT_NE(rest->fingerprint(), TokenData::open(file.path())->fingerprint());
}

}  // namespace
}  // namespace ballast::gpt
