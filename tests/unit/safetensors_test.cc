// Safetensors files: what is right is read, and everything else is refused with what is wrong.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/engine/safetensors.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <limits>

#include "safetensors/header.h"
#include "support/safetensors_support.h"
#include "support/synthetic_trainer.h"

namespace ballast::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}

// The error that a file of these bytes gives; "read" where there is none.
std::string refusal(const std::string& bytes) {
  const TemporaryDirectory directory;
  write_bytes(directory.path() + "/x.safetensors", bytes);
  try {
    const SafetensorsReader reader(directory.path() + "/x.safetensors");
  } catch (const CorruptionError& error) {
    EXPECT_THAT(error.what(), HasSubstr("x.safetensors"));
    EXPECT_LT(std::string(error.what()).size(), 600U);
    return error.what();
  }
  return "read";
}

std::string refusal(const std::string& entries, std::size_t data_bytes) {
  return refusal(safetensors_bytes("{" + entries + "}", std::string(data_bytes, '\1')));
}

TEST(Safetensors, DuplicatesAreNamed) {
  EXPECT_THAT(refusal(entry("a", "F32", "[4]", "[0,16]") + "," + entry("a", "F32", "[4]", "[16,32]"), 32),
              HasSubstr("tensor \"a\" comes twice"));
  EXPECT_THAT(refusal(R"("a":{"dtype":"F32","dtype":"F32","shape":[4],"data_offsets":[0,16]})", 16),
              HasSubstr("twice the same key"));
  EXPECT_THAT(refusal(R"("__metadata__":{"a":"1","a":"2"})", 0), HasSubstr("metadata key \"a\" comes twice"));
  EXPECT_THAT(refusal(R"("__metadata__":{},"__metadata__":{})", 0), HasSubstr("come twice"));
}

TEST(Safetensors, RangesMustFitShapeTypeAndFile) {
  const auto one = [](const std::string& offsets, std::size_t data, const std::string& shape = "[4]") {
    return refusal(entry("a", "F32", shape, offsets), data);
  };
  EXPECT_EQ(one("[0,16]", 16), "read");
  EXPECT_THAT(one("[0,4]", 4, "[1000,1000]"), HasSubstr("1000000 elements of F32, 4000000 bytes"));
  EXPECT_THAT(one("[8,4]", 8), HasSubstr("ends before it begins"));
  EXPECT_THAT(one("[0,17]", 17), HasSubstr("16 bytes, and is said to be at [0, 17)"));
  EXPECT_THAT(one("[1,17]", 16), HasSubstr("a hole"));
  EXPECT_THAT(one("[0]", 16), HasSubstr("1 offsets instead of two"));
  EXPECT_THAT(one("[]", 16), HasSubstr("0 offsets instead of two"));
  EXPECT_THAT(one("[0,4,8]", 16), HasSubstr("more than two offsets"));
  EXPECT_THAT(one("[-1,16]", 16), HasSubstr("the number -1"));
  EXPECT_THAT(one("[0,16.5]", 16), HasSubstr("the number 16.5"));
  EXPECT_THAT(one("[0,1.6e1]", 16), HasSubstr("the number 1.6e1"));
  EXPECT_THAT(one("[0,1e400]", 16), HasSubstr("tensor \"a\": the number 1e400"));
  EXPECT_THAT(one("[0,\"16\"]", 16), HasSubstr("the text \"16\""));
  EXPECT_THAT(one("[0,null]", 16), HasSubstr("null"));
  EXPECT_THAT(one("[0,[16]]", 16), HasSubstr("a list"));
  EXPECT_THAT(one("null", 16), HasSubstr("null"));
  EXPECT_THAT(one("[0,16]", 16, "4"), HasSubstr("the number 4"));
  EXPECT_THAT(one("[0,16]", 16, "[-4]"), HasSubstr("-4"));
  // As a double it would be one less, which is even.
  EXPECT_THAT(one("[0,9007199254740993]", 16), HasSubstr("9007199254740993, which is beyond 2^53"));
  EXPECT_THAT(one("[0,99999999999999999999999]", 16), HasSubstr("the number 99999999999999999999999"));
  EXPECT_THAT(one("[0,16]", 16, "[4294967296,4294967296,4]"), HasSubstr("more than 2^53 elements"));
  EXPECT_THAT(one("[0,0]", 0, "[9007199254740992,9007199254740992,0]"), "read");
  EXPECT_THAT(one(
                  "[0,16]", 16,
                  "[" + std::string(200, ' ') + "4" +
                      [] {
                        std::string ones;
                        for (int i = 0; i < 64; ++i) ones += ",1";
                        return ones;
                      }() +
                      "]"),
              HasSubstr("more than 64 dimensions"));
  EXPECT_THAT(refusal(R"("a":{"shape":[4],"data_offsets":[0,16]})", 16), HasSubstr("\"a\": it has no dtype"));
  EXPECT_THAT(refusal(R"("a":{"dtype":"F32","data_offsets":[0,16]})", 16), HasSubstr("it has no shape"));
  EXPECT_THAT(refusal(R"("a":{"dtype":"F32","shape":[4]})", 16), HasSubstr("it has no data_offsets"));
  EXPECT_THAT(refusal(R"("a":{"dtype":"F32","shape":[4],"data_offsets":[0,16],"extra":1})", 16),
              HasSubstr("an unknown key at \"extra\""));
  EXPECT_THAT(refusal(R"("a":7)", 16), HasSubstr("the number 7"));
  EXPECT_THAT(refusal(R"("a":[])", 16), HasSubstr("a list at \"a\""));
}

TEST(Safetensors, EveryByteBelongsToExactlyOneTensor) {
  const auto two = [](const std::string& k, const std::string& v, std::size_t data) {
    return refusal(entry("k", "U8", "[" + k.substr(k.find('|') + 1) + "]", k.substr(0, k.find('|'))) + "," +
                       entry("v", "U8", "[" + v.substr(v.find('|') + 1) + "]", v.substr(0, v.find('|'))),
                   data);
  };
  EXPECT_THAT(two("[0,64]|64", "[0,64]|64", 64), HasSubstr("they overlap"));
  EXPECT_THAT(two("[0,64]|64", "[32,96]|64", 96),
              AllOf(HasSubstr("tensor \"v\" begins at byte 32"), HasSubstr("\"k\", ends at 64: they overlap")));
  EXPECT_THAT(two("[0,16]|16", "[32,48]|16", 48), HasSubstr("a hole"));
  EXPECT_EQ(two("[16,32]|16", "[0,16]|16", 32), "read");
  EXPECT_THAT(two("[0,16]|16", "[8,8]|0", 16), HasSubstr("they overlap"));
}

TEST(Safetensors, TypesAreKnownOrRefusedByName) {
  for (const char* dtype : {"F8_E4M3", "F8_E5M2", "BOOL", "U8", "I8"}) {
    EXPECT_EQ(refusal(entry("a", dtype, "[3]", "[0,3]"), 3), "read") << dtype;
  }
  for (const char* dtype : {"I64", "U64", "F64", "C64"}) {
    EXPECT_EQ(refusal(entry("a", dtype, "[3]", "[0,24]"), 24), "read") << dtype;
    EXPECT_THAT(refusal(entry("a", dtype, "[3]", "[0,3]"), 3), HasSubstr("24 bytes")) << dtype;
  }
  for (const char* dtype : {"I16", "U16", "BF16", "F16"}) {
    EXPECT_EQ(refusal(entry("a", dtype, "[3]", "[0,6]"), 6), "read") << dtype;
    EXPECT_THAT(refusal(entry("a", dtype, "[3]", "[0,3]"), 3), HasSubstr("6 bytes")) << dtype;
  }
  EXPECT_EQ(refusal(entry("a", "F4", "[6]", "[0,3]"), 3), "read");
  EXPECT_THAT(refusal(entry("a", "F4", "[5]", "[0,3]"), 3), HasSubstr("whole byte"));
  EXPECT_THAT(refusal(entry("a", "f32", "[3]", "[0,12]"), 12), HasSubstr("unknown dtype \"f32\""));
  EXPECT_THAT(refusal(entry("a", "", "[3]", "[0,12]"), 12), HasSubstr("unknown dtype"));
  EXPECT_THAT(refusal(entry("a", std::string(1000, 'F'), "[3]", "[0,12]"), 12), HasSubstr("unknown dtype"));
}

TEST(Safetensors, EmptyTensorsAndMetadataAreLegal) {
  EXPECT_EQ(refusal(entry("a", "F32", "[0]", "[0,0]") + "," + entry("b", "F32", "[0,4]", "[0,0]") + "," +
                        entry("c", "F32", "[]", "[0,4]") + "," + entry("d", "F32", "[4,0]", "[4,4]"),
                    4),
            "read");
  EXPECT_THAT(refusal(entry("a", "F32", "[1]", "[0,0]"), 0), HasSubstr("1 elements of F32, 4 bytes"));
  EXPECT_EQ(refusal("", 0), "read");
  EXPECT_EQ(refusal(R"("__metadata__":{})", 0), "read");
  EXPECT_EQ(refusal("\"__metadata__\":{\"a \\\"\\n\":\"\\u00e9\xc3\xa9\"}", 0), "read");
  for (const char* value : {"1", "null", "true", "{}", "[]", "1.5"}) {
    EXPECT_THAT(refusal(std::string("\"__metadata__\":{\"a\":") + value + "}", 0), HasSubstr("only texts"));
  }
  EXPECT_THAT(refusal(R"("__metadata__":"pt")", 0), HasSubstr("the text \"pt\""));
  EXPECT_THAT(refusal(R"("__metadata__":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})", 1), HasSubstr("only texts"));
}

TEST(Safetensors, LengthsAreCheckedAndTold) {
  const std::string whole = safetensors_bytes("{" + entry("a", "F32", "[4]", "[0,16]") + "}", std::string(16, 'x'));
  EXPECT_EQ(refusal(whole), "read");
  const std::string size = std::to_string(whole.size());
  EXPECT_THAT(refusal(whole + "y"), AllOf(HasSubstr("has " + std::to_string(whole.size() + 1) + " bytes"),
                                          HasSubstr("there are " + size), HasSubstr("something follows")));
  EXPECT_THAT(refusal(whole + std::string(4096, '\0')), HasSubstr("something follows"));
  EXPECT_THAT(refusal(whole.substr(0, whole.size() - 1)),
              AllOf(HasSubstr("there are " + size), HasSubstr("cut short")));
  EXPECT_THAT(refusal(whole.substr(0, 30)), AllOf(HasSubstr("has 30 bytes"), HasSubstr("cut short")));
  EXPECT_THAT(refusal(whole.substr(0, 7)), HasSubstr("has 7 bytes"));
  EXPECT_THAT(refusal(""), HasSubstr("has 0 bytes"));
  EXPECT_THAT(refusal("version 1 of a pointer to the file that is somewhere else\nsize 5\n"),
              HasSubstr("no safetensors"));
  std::string huge = whole;
  huge[3] = 6;  // 100,663,296 and more
  EXPECT_THAT(refusal(huge), HasSubstr("beyond the limit of 100000000"));
  EXPECT_THAT(refusal(safetensors_bytes("", "")), HasSubstr("does not begin with {"));
  const TemporaryDirectory directory;
  EXPECT_THROW(SafetensorsReader(directory.path() + "/none"), IoError);
  EXPECT_THROW(SafetensorsReader("/dev/null"), IoError);
  EXPECT_THROW(SafetensorsReader{directory.path()}, IoError);  // an empty folder
}

// Sparse files: a header of the most bytes that there may be is read, one of a byte more is not.
TEST(Safetensors, AHeaderMayHaveAHundredMillionBytesAndNotOneMore) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/x.safetensors";
  for (const std::uint64_t length : {std::uint64_t{100'000'000}, std::uint64_t{100'000'001}}) {
    std::string head(8, '\0');
    std::memcpy(head.data(), &length, 8);
    write_bytes(path, head + "{");
    std::filesystem::resize_file(path, 8 + length);
    try {
      const SafetensorsReader reader(path);
      ADD_FAILURE() << "zeros are no JSON";
    } catch (const CorruptionError& error) {
      EXPECT_THAT(error.what(), HasSubstr(length > 100'000'000 ? "beyond the limit of 100000000" : "a zero byte"));
    }
  }
}

TEST(Safetensors, HardJsonIsRefused) {
  const std::string a = entry("a", "U8", "[1]", "[0,1]");
  const auto text = [](const std::string& header) { return refusal(safetensors_bytes(header, "x")); };
  EXPECT_EQ(text("{" + a + "}     \n\t"), "read");
  for (const std::string& wrong :
       {" {" + a + "}", "\xef\xbb\xbf{" + a + "}", "{" + a + "} {}", "{" + a + ",}", "{" + a, "{/*x*/" + a + "}",
        "{" + a + "}" + std::string(4, '\0'), "[" + a + "]", std::string("{\"\xff\":{}}"),
        std::string(R"({"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}})"), std::string("null"),
        std::string(R"({"a":{"dtype":"U8","shape":[01],"data_offsets":[0,1]}})"),
        "{\"a\":" + std::string(1'000'000, '['), "{\"__metadata__\":" + std::string(1'000'000, '{'),
        std::string(R"({"\ud800":{}})")}) {
    EXPECT_NE(text(wrong), "read") << wrong.substr(0, 80);
  }
}

TEST(Safetensors, ValuesAreReadWhereverTheyBegin) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/x.safetensors";
  const std::vector<float> f32 = {1.5F, -0.0F, std::numeric_limits<float>::infinity(), 3e-45F};
  const std::vector<std::uint16_t> bf16 = {0x3F80, 0xC000, 0x7F80, 1, 0x8000}, f16 = {0x3C00, 0xFBFF};
  std::string data = "abc";
  data.append(reinterpret_cast<const char*>(f32.data()), 16);
  data.append(reinterpret_cast<const char*>(bf16.data()), 10);
  data.append(reinterpret_cast<const char*>(f16.data()), 4);
  std::string header = "{" + entry("odd", "U8", "[3]", "[0,3]") + "," + entry("f", "F32", "[2,2]", "[3,19]") + "," +
                       entry("b", "BF16", "[5]", "[19,29]") + "," + entry("h", "F16", "[2]", "[29,33]") + "}";
  header.append((113 - header.size() % 8) % 8, ' ');
  ASSERT_EQ(header.size() % 8, 1U);
  write_bytes(path, safetensors_bytes(header, data));
  SafetensorsReader reader(path);
  const auto values = [&](const char* name) {
    const std::size_t index = *reader.find(name);
    std::vector<float> all(static_cast<std::size_t>(reader.tensors()[index].elements));
    reader.read(index, 0, all);
    if (all.size() > 1) {
      float last = 0;
      reader.read(index, static_cast<std::int64_t>(all.size()) - 1, {&last, 1});
      EXPECT_EQ(last, all.back());
    }
    return all;
  };
  EXPECT_EQ(values("f"), f32);
  EXPECT_TRUE(std::signbit(values("f")[1]));
  EXPECT_THAT(values("b"), ElementsAre(1.0F, -2.0F, std::numeric_limits<float>::infinity(), 0x1p-133F, -0.0F));
  EXPECT_THAT(values("h"), ElementsAre(1.0F, -65504.0F));
  EXPECT_THROW(values("odd"), ConfigError);
  EXPECT_EQ(reader.find("c"), std::nullopt);
  std::vector<float> two(2);
  EXPECT_THROW(reader.read(*reader.find("b"), 4, two), UsageError);
  EXPECT_THROW(reader.read(*reader.find("b"), -1, two), UsageError);
  EXPECT_THROW(reader.read(17, 0, two), UsageError);
  std::filesystem::resize_file(path, 8 + header.size() + 4);
  EXPECT_THROW(values("f"), CorruptionError);
}

TEST(Safetensors, OffsetsBeyondFourGibibytesAreRight) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/sparse.safetensors";
  const std::uint64_t a = std::uint64_t{5} << 29, b = std::uint64_t{1} << 31;  // 2.5 and 2 GiB
  const auto range = [](std::uint64_t begin, std::uint64_t end) {
    return "[" + std::to_string(begin) + "," + std::to_string(end) + "]";
  };
  const std::string header = "{" + entry("a", "BF16", "[" + std::to_string(a / 2) + "]", range(0, a)) + "," +
                             entry("b", "F32", "[" + std::to_string(b / 4) + "]", range(a, a + b)) + "," +
                             entry("c", "F32", "[4]", range(a + b, a + b + 16)) + "}";
  write_bytes(path, safetensors_bytes(header, ""));
  const std::uint64_t data = 8 + header.size();
  std::filesystem::resize_file(path, data + a + b + 16);
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    const std::uint16_t two = 0x4000;
    const float three = 3, four[4] = {4, 5, 6, 7};
    const auto put = [&](std::uint64_t at, const void* from, std::size_t bytes) {
      file.seekp(static_cast<std::streamoff>(data + at));
      file.write(static_cast<const char*>(from), static_cast<std::streamsize>(bytes));
    };
    put(a - 2, &two, 2);
    put(a + b - 4, &three, 4);
    put(a + b, four, 16);
  }
  SafetensorsReader reader(path);
  float value = 0;
  reader.read(0, static_cast<std::int64_t>(a / 2) - 1, {&value, 1});
  EXPECT_EQ(value, 2.0F);
  reader.read(1, static_cast<std::int64_t>(b / 4) - 1, {&value, 1});
  EXPECT_EQ(value, 3.0F);
  std::vector<float> last(4);
  reader.read(2, 0, last);
  EXPECT_THAT(last, ElementsAre(4, 5, 6, 7));
}

TEST(Safetensors, AnIndexMustAgreeWithItsFiles) {
  const TemporaryDirectory directory;
  const std::string folder = directory.path() + "/";
  const auto file = [&](const std::string& name, const std::string& tensor) {
    write_bytes(folder + name,
                safetensors_bytes("{" + entry(tensor, "F32", "[1]", "[0,4]") + "}", std::string(4, 'x')));
  };
  const auto with_index = [&](const std::string& index) -> std::string {
    write_bytes(folder + "model.safetensors.index.json", index);
    try {
      return std::to_string(SafetensorsReader(directory.path()).tensors().size());
    } catch (const CorruptionError& error) {
      return error.what();
    } catch (const IoError& error) {
      return error.what();
    }
  };
  file("one.safetensors", "a");
  EXPECT_EQ(SafetensorsReader(directory.path()).tensors().size(), 1U);
  file("two.safetensors", "b");
  EXPECT_THROW(SafetensorsReader{directory.path()}, IoError);  // which?
  EXPECT_EQ(with_index(R"({"metadata":{"total_size":8,"x":[{}]},
                           "weight_map":{"a":"one.safetensors","b":"two.safetensors"}})"),
            "2");
  EXPECT_EQ(with_index(R"({"weight_map":{"b":"two.safetensors"}})"), "1");
  EXPECT_THAT(with_index(R"({"weight_map":{"a":"one.safetensors","b":"one.safetensors"}})"),
              HasSubstr("holds 1 tensors, and"));
  EXPECT_THAT(with_index(R"({"weight_map":{"b":"one.safetensors"}})"), HasSubstr("does not say so"));
  EXPECT_THAT(with_index(R"({"weight_map":{"a":"one.safetensors","a":"one.safetensors"}})"), HasSubstr("comes twice"));
  EXPECT_THAT(with_index(R"({"weight_map":{"a":"none.safetensors"}})"), HasSubstr("none.safetensors"));
  EXPECT_THAT(with_index(R"({"weight_map":{"a":"../one.safetensors"}})"), HasSubstr("no name of a file"));
  EXPECT_THAT(with_index(R"({"weight_map":{"a":".."}})"), HasSubstr("no name of a file"));
  EXPECT_THAT(with_index(R"({"weight_map":{"a":"one.safetensors\u0000x"}})"), HasSubstr("no name of a file"));
  EXPECT_THAT(with_index(R"({"weight_map":{"a":1}})"), HasSubstr("the number 1"));
  EXPECT_THAT(with_index(R"({"weight_map":[]})"), HasSubstr("weight_map"));
  EXPECT_THAT(with_index(R"({"weight_map":{},"weight_map":{}})"), HasSubstr("comes twice"));
  EXPECT_THAT(with_index("{}"), HasSubstr("no weight_map"));
  EXPECT_THAT(with_index("[]"), HasSubstr("does not begin with {"));
  EXPECT_THAT(with_index("{\"metadata\":" + std::string(1'000'000, '[')), HasSubstr("nested too deeply"));
}

}  // namespace
}  // namespace ballast::testing
