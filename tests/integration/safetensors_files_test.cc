// Safetensors files as they are written, to the bit, whatever names, sizes and places; and files of other writers
// imported wherever their tensors begin.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/engine/checkpoint.h>
#include <ballast/engine/safetensors.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <bit>
#include <filesystem>

#include "support/engine_support.h"
#include "support/safetensors_support.h"
#include "support/sanitizers.h"
#include "support/unkind_places.h"

namespace ballast::testing {
namespace {

using test::contains;
using test::expect;
using ::testing::AllOf;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

float fp32(std::uint32_t bits) { return std::bit_cast<float>(bits); }

// The data behind the header of a file with one tensor, as 16-bit words.
std::vector<std::uint16_t> words_of(const std::string& path) {
  const std::string bytes = bytes_of(path);
  std::uint64_t header = 0;
  std::memcpy(&header, bytes.data(), 8);
  std::vector<std::uint16_t> words((bytes.size() - 8 - header) / 2);
  std::memcpy(words.data(), bytes.data() + 8 + header, words.size() * 2);
  return words;
}

class SafetensorsFiles : public ::testing::Test {
 protected:
  // One unit "u" of one parameter "w" with these values.
  void import_values(const std::vector<float>& values, const std::string& to, std::optional<DataType> dtype) {
    const std::string file = path_ + "/source.safetensors", bytes = std::to_string(values.size() * 4);
    write_bytes(file, safetensors_bytes(R"({"u.w":{"dtype":"F32","shape":[)" + std::to_string(values.size()) +
                                            "],\"data_offsets\":[0," + bytes + "]}}",
                                        {reinterpret_cast<const char*>(values.data()), values.size() * 4}));
    SafetensorsReader reader(file);
    import_safetensors(reader, {{"u", {{"w", {static_cast<std::int64_t>(values.size())}}}}}, to, {.dtype = dtype});
  }

  const Watchdog watchdog_{200};
  const TemporaryDirectory directory_;
  const std::string path_ = directory_.path();
};

struct Rounding {
  std::uint32_t bits;
  std::uint16_t even, device;  // cast to nearest even; as the split master has it, ties away from zero
};

// What is rounded on the way in goes to nearest even; what is written out is, bit for bit, what the device computed
// with, whose ties go away from zero. NaN stays NaN and infinity infinity both ways.
TEST_F(SafetensorsFiles, Bf16RoundsToNearestEvenOnTheWayInAndIsTheDevicesOwnOnTheWayOut) {
  const std::vector<Rounding> all = {{0x3F800000, 0x3F80, 0x3F80},
                                     {0x3F807FFF, 0x3F80, 0x3F80},
                                     {0x3F808000, 0x3F80, 0x3F81},
                                     {0x3F808001, 0x3F81, 0x3F81},
                                     {0x3F818000, 0x3F82, 0x3F82},
                                     {0xBF808000, 0xBF80, 0xBF81},
                                     {0xBF818000, 0xBF82, 0xBF82},
                                     {0x3F7F8000, 0x3F80, 0x3F80},
                                     {0x00000001, 0x0000, 0x0000},
                                     {0x00008000, 0x0000, 0x0001},
                                     {0x80008000, 0x8000, 0x8001},
                                     {0x80000000, 0x8000, 0x8000},
                                     {0x7F800000, 0x7F80, 0x7F80},
                                     {0xFF800000, 0xFF80, 0xFF80},
                                     {0x7F7F7FFF, 0x7F7F, 0x7F7F},
                                     {0x7FC00000, 0x7FC0, 0x7FC0},
                                     {0xFFC12345, 0, 0},
                                     {0x7F800001, 0, 0},
                                     {0x7FFFFFFF, 0, 0}};
  std::vector<float> values;
  for (const Rounding& one : all) values.push_back(fp32(one.bits));
  import_values(values, path_ + "/even/step-0", DataType::bf16);
  CheckpointReader even({path_ + "/even"});
  export_safetensors(even, path_ + "/even-out");
  const std::vector<std::uint16_t> rounded = words_of(path_ + "/even-out/model.safetensors");
  // The same values as masters of an engine whose device computes with bf16.
  const Config config = plain_config(path_ + "/run", Tier::nvme, Timing::just_in_time);
  std::vector<std::uint16_t> computed_with(all.size());
  {
    Engine engine(config);
    engine.add_unit("u", {{"w", {static_cast<std::int64_t>(all.size())}}});
    engine.commit();
    engine.initialize([&](ParameterId, std::int64_t first, std::span<float> out) {
      std::memcpy(out.data(), values.data() + first, out.size_bytes());
    });
    {
      auto pass = engine.begin_pass({.kind = Pass::evaluate});
      auto lease = engine.acquire({0}, engine.stream());
      lease.wait();
      std::memcpy(computed_with.data(), lease[{0, 0}].data, all.size() * 2);
    }
    engine.save_checkpoint(path_ + "/saved/step-0");
  }
  CheckpointReader saved({path_ + "/saved"});
  export_safetensors(saved, path_ + "/device-out");
  const std::vector<std::uint16_t> written = words_of(path_ + "/device-out/model.safetensors");
  EXPECT_THAT(written, ElementsAreArray(computed_with));
  ASSERT_EQ(rounded.size(), all.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(i);
    if (std::isnan(values[i])) {
      EXPECT_TRUE(std::isnan(bf16_value(rounded[i])) && std::isnan(bf16_value(written[i])));
      EXPECT_EQ(std::signbit(bf16_value(written[i])), std::signbit(values[i]));
      continue;
    }
    EXPECT_EQ(rounded[i], all[i].even);
    EXPECT_EQ(written[i], all[i].device);
  }
  // The masters are all there: --exact writes them. (A NaN that would be cut to infinity has become a quiet one.)
  export_safetensors(saved, path_ + "/exact-out", {.exact = true});
  std::vector<float> exact(all.size());
  SafetensorsReader(path_ + "/exact-out").read(0, 0, exact);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (std::isnan(values[i])) {
      EXPECT_TRUE(std::isnan(exact[i])) << i;
    } else {
      EXPECT_EQ(std::bit_cast<std::uint32_t>(exact[i]), all[i].bits) << i;
    }
  }
}

TEST_F(SafetensorsFiles, Fp16RoundsToNearestEven) {
  const std::vector<std::pair<std::uint32_t, std::uint16_t>> all = {
      {0x3F800000, 0x3C00}, {0x3F801000, 0x3C00}, {0x3F801001, 0x3C01}, {0x3F803000, 0x3C02}, {0xBF801000, 0xBC00},
      {0x477FE000, 0x7BFF}, {0x477FEFFF, 0x7BFF}, {0x33800000, 0x0001}, {0x33000000, 0x0000}, {0x33000001, 0x0001},
      {0x80000000, 0x8000}, {0x7F800000, 0x7C00}, {0x7FC00000, 0x7E00}};
  std::vector<float> values;
  for (const auto& [bits, half] : all) values.push_back(fp32(bits));
  import_values(values, path_ + "/step-0", DataType::fp16);
  CheckpointReader reader({path_ + "/step-0"});
  export_safetensors(reader, path_ + "/out");
  const std::vector<std::uint16_t> written = words_of(path_ + "/out/model.safetensors");
  ASSERT_EQ(written.size(), all.size());
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(written[i], all[i].second) << i;
}

TEST_F(SafetensorsFiles, NamesOfAnyKindSurvive) {
  const std::vector<std::string> names = {"../up",    "a/b",          "a b",   "100%", "..",
                                          "\xc3\xa9", "\"\\\n\t\x01", "a.b.c", "",     std::string(300, 'x')};
  std::vector<SyntheticUnit> model = {{"u/\xe2\x82\xac ..", {}}};
  for (const std::string& name : names) model[0].parameters.push_back({name, {3}});
  Engine engine(plain_config(path_ + "/run", Tier::nvme, Timing::just_in_time));
  SyntheticTrainer trainer(engine, model);
  engine.commit();
  trainer.initialize();
  engine.save_checkpoint(path_ + "/saves/step-0");
  CheckpointReader reader({path_ + "/saves"});
  export_safetensors(reader, path_ + "/out");
  SafetensorsReader exported(path_ + "/out");
  ASSERT_EQ(exported.tensors().size(), names.size());
  for (const std::string& name : names) {
    EXPECT_TRUE(reader.find(model[0].name, name)) << name;
    EXPECT_TRUE(exported.find(model[0].name + "." + name)) << name;
  }
  for (const char* reserved : {"__metadata__", "\xff"}) {
    EXPECT_THROW(
        export_safetensors(reader, path_ + "/never", {.name = [&](const StoredParameter&) { return reserved; }}),
        ConfigError);
  }
  std::vector<std::string> made;
  for (const auto& entry : std::filesystem::directory_iterator(path_)) made.push_back(entry.path().filename());
  std::sort(made.begin(), made.end());
  EXPECT_EQ(made, (std::vector<std::string>{"out", "run", "saves"}));
}

TEST_F(SafetensorsFiles, AModelOfNothingIsAValidFile) {
  const std::string file = path_ + "/empty.safetensors";
  write_bytes(file, safetensors_bytes("{\"__metadata__\":{\"a \\\"\\n\":\"\\u00e9\xc3\xa9\",\"format\":\"pt\"}}", ""));
  SafetensorsReader source(file);
  EXPECT_THAT(source.metadata(),
              ::testing::ElementsAre(::testing::Pair("a \"\n", "\xc3\xa9\xc3\xa9"), ::testing::Pair("format", "pt")));
  import_safetensors(source, {}, path_ + "/saves/step-0");
  CheckpointReader reader({path_ + "/saves"});
  reader.verify();
  EXPECT_EQ(export_safetensors(reader, path_ + "/out"), 1);
  SafetensorsReader exported(path_ + "/out");
  EXPECT_TRUE(exported.tensors().empty());
  EXPECT_THAT(exported.metadata(), ::testing::ElementsAre(::testing::Pair("format", "pt")));
}

// A header of 113 bytes, a tensor of three bytes before the others: nothing is aligned.
TEST_F(SafetensorsFiles, UnalignedTensorsAreImportedIntoEveryTier) {
  const std::vector<float> wide = {1.5F, -0.0F, 3e-45F, -2};
  const std::vector<std::uint16_t> narrow = {0x3F80, 0xC000, 0x0001, 0x8000, 0x4049};
  std::string data = "abc";
  data.append(reinterpret_cast<const char*>(wide.data()), 16);
  data.append(reinterpret_cast<const char*>(narrow.data()), 10);
  std::string header = R"({"odd":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
                       R"("u.f":{"dtype":"F32","shape":[4],"data_offsets":[3,19]},)"
                       R"("u.b":{"dtype":"BF16","shape":[5],"data_offsets":[19,29]}})";
  header.append((8 + 1 - header.size() % 8) % 8, ' ');
  ASSERT_EQ(header.size() % 8, 1U);
  write_bytes(path_ + "/x.safetensors", safetensors_bytes(header, data));
  SafetensorsReader source(path_ + "/x.safetensors");
  const std::vector<ModelUnit> units = {{"u", {{"f", {4}}, {"b", {5}}}}};
  import_safetensors(source, units, path_ + "/saves/step-0",
                     {.ignore = [](const SafetensorsTensor& tensor) { return tensor.dtype == "U8"; }});
  for (const Tier tier : {Tier::device, Tier::host, Tier::nvme}) {
    Engine engine(plain_config(path_ + "/run", tier, Timing::just_in_time));
    engine.add_unit("u", units[0].parameters);
    engine.commit({ExistingRun::resume, path_ + "/saves"});
    ASSERT_TRUE(engine.resumed());
    std::vector<float> f(4), b(5);
    engine.read({0, 0}, 0, f);
    engine.read({0, 1}, 0, b);
    EXPECT_EQ(std::memcmp(f.data(), wide.data(), 16), 0);
    for (std::size_t i = 0; i < b.size(); ++i) {
      const float expected = bf16_value(narrow[i]);
      EXPECT_EQ(std::memcmp(&b[i], &expected, 4), 0) << i;
    }
  }
}

// Names of 10,000 characters for 11,000 tensors pass the 100,000,000 bytes that readers take: more than one file.
TEST_F(SafetensorsFiles, AHeaderBeyondTheReadersLimitIsSplitOverFiles) {
  if (test::kSanitized) GTEST_SKIP() << "a hundred megabytes of names take a sanitizer too long";
  constexpr int kTensors = 11'000;
  std::string header = "{";
  ModelUnit unit{"u", {}};
  for (int i = 0; i < kTensors; ++i) {
    const std::string name = std::to_string(i), at = std::to_string(i * 2);
    unit.parameters.push_back({name, {1}});
    header += (i > 0 ? ",\"u." : "\"u.") + name + R"(":{"dtype":"BF16","shape":[1],"data_offsets":[)" + at + "," +
              std::to_string(i * 2 + 2) + "]}";
  }
  std::string data(std::size_t{kTensors} * 2, '\0');
  for (std::size_t i = 0; i < kTensors; ++i) data[2 * i] = static_cast<char>(i % 100);
  write_bytes(path_ + "/x.safetensors", safetensors_bytes(header + "}", data));
  {
    SafetensorsReader source(path_ + "/x.safetensors");
    import_safetensors(source, {unit}, path_ + "/saves/step-0");
  }
  const auto long_name = [](const std::string& name) { return std::string(10'000 - name.size(), 'n') + name; };
  CheckpointReader reader({path_ + "/saves"});
  const int files = export_safetensors(
      reader, path_ + "/out", {.name = [&](const StoredParameter& parameter) { return long_name(parameter.name); }});
  EXPECT_EQ(files, 2);
  for (const auto& entry : std::filesystem::directory_iterator(path_ + "/out")) {
    if (entry.path().extension() != ".safetensors") continue;
    const std::string head = bytes_of(entry.path()).substr(0, 8);
    std::uint64_t length = 0;
    std::memcpy(&length, head.data(), 8);
    EXPECT_LE(length, 100'000'000U);
  }
  SafetensorsReader exported(path_ + "/out");
  ASSERT_EQ(exported.tensors().size(), std::size_t{kTensors});
  for (const int i : {0, 9'999, kTensors - 1}) {
    float value = -1;
    exported.read(exported.find(long_name(std::to_string(i))).value(), 0, {&value, 1});
    EXPECT_EQ(value, bf16_value(static_cast<std::uint16_t>(i % 100)));
  }
}

TEST_F(SafetensorsFiles, AFullPlaceOrALimitIsRefusedWithNumbersAndLeavesNothing) {
  import_values(std::vector<float>(1'000'000, 1.5F), path_ + "/saves/step-0", {});
  const std::string place = path_ + "/place";
  std::filesystem::create_directory(place);
  test::expect_child(
      [&] {
        if (!test::own_mounts() || !test::mount_tmpfs(place, 1 << 20)) return test::kMissing;
        CheckpointReader reader({path_ + "/saves"});
        try {
          export_safetensors(reader, place + "/out");
          throw test::Wrong("four megabytes fit into one");
        } catch (const IoError& error) {
          for (const char* part : {"not enough space in", "/place/out", "wanted 3.81 MiB", "free "})
            expect(contains(error.what(), part), error.what());
        }
        expect(std::filesystem::is_empty(place + "/out"), "something is left");
        return 0;
      },
      "no right to mount a tmpfs here");
  test::expect_child(
      [&] {
        test::limit(RLIMIT_FSIZE, 1 << 20);
        CheckpointReader reader({path_ + "/saves"});
        try {
          export_safetensors(reader, path_ + "/out");
          throw test::Wrong("a file beyond the limit was written");
        } catch (const IoError& error) {
          expect(contains(error.what(), "ulimit -f") && contains(error.what(), path_ + "/out"), error.what());
        }
        expect(std::filesystem::is_empty(path_ + "/out"), "something is left");
        return 0;
      },
      "");
}

}  // namespace
}  // namespace ballast::testing
