// Mutated safetensors files, indexes and manifests: each is read or refused by a typed error, whatever its bytes, and
// what is read makes sense. BALLAST_FUZZ_SECONDS: how long each; BALLAST_FUZZ_SEED: where to begin.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/base/random.h>
#include <ballast/engine/safetensors.h>
#include <ballast/offload/chunk_work.h>
#include <ballast/offload/cpu_pool.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <set>
#include <span>

#include "durable/manifest.h"
#include "safetensors/header.h"
#include "support/safetensors_support.h"
#include "support/sanitizers.h"
#include "support/synthetic_trainer.h"

namespace ballast::testing {
namespace {

using Clock = std::chrono::steady_clock;

std::uint64_t number_from(const char* name, std::uint64_t usual) {
  const char* text = std::getenv(name);
  return text == nullptr ? usual : std::strtoull(text, nullptr, 10);
}

const char* const kPieces[] = {"{",
                               "}",
                               "[",
                               "]",
                               ",",
                               ":",
                               "\"",
                               "\\",
                               "\\u0000",
                               "\xff",
                               "\n",
                               "null",
                               "1e400",
                               "-1",
                               "true",
                               "0",
                               "1",
                               "9007199254740992",
                               "9007199254740993",
                               "18446744073709551615",
                               "18446744073709551616",
                               "4294967296",
                               "\"F32\"",
                               "\"BF16\"",
                               "\"F4\"",
                               "\"I64\"",
                               "\"dtype\"",
                               "\"shape\"",
                               "\"data_offsets\"",
                               "\"__metadata__\"",
                               "\"a\"",
                               "[0,0]",
                               "[]",
                               "{}",
                               "\xc3",
                               "//",
                               "e",
                               ".",
                               "\"weight_map\"",
                               "\"one.safetensors\"",
                               "\"../x\"",
                               " "};

void mutate(base::Random& random, std::string& text) {
  for (std::uint64_t changes = 1 + random.below(4); changes > 0; --changes) {
    const std::size_t at = random.below(text.size() + 1);
    switch (random.below(7)) {
      case 0:
        text.insert(at, kPieces[random.below(std::size(kPieces))]);
        break;
      case 1:
        text.erase(at, 1 + random.below(20));
        break;
      case 2:
        text.resize(at);
        break;
      case 3:
        if (at < text.size()) text[at] = static_cast<char>(random.below(256));
        break;
      case 4:  // a digit for another
        for (std::size_t i = at; i < text.size(); ++i) {
          if (text[i] < '0' || text[i] > '9') continue;
          text[i] = static_cast<char>('0' + random.below(10));
          break;
        }
        break;
      case 5: {  // a part again, somewhere
        const std::string part = text.substr(random.below(text.size() + 1), random.below(80));
        text.insert(at, part);
        break;
      }
      default:
        if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << random.below(8)));
    }
  }
}

// Runs `one` for seed after seed until the time or the number of them is over.
void for_seeds(const char* test, std::uint64_t usual_rounds, const std::function<bool(base::Random&)>& one) {
  const std::uint64_t first = number_from("BALLAST_FUZZ_SEED", 1), seconds = number_from("BALLAST_FUZZ_SECONDS", 0);
  const std::uint64_t rounds = test::kSanitized ? usual_rounds / 5 : usual_rounds;
  const Clock::time_point end = Clock::now() + std::chrono::seconds(seconds);
  std::uint64_t accepted = 0, seed = first;
  for (; seconds > 0 ? Clock::now() < end : seed < first + rounds; ++seed) {
    SCOPED_TRACE("repeat with BALLAST_FUZZ_SEED=" + std::to_string(seed) +
                 " safetensors_fuzz_test --gtest_filter=" + test);
    base::Random random(seed);
    try {
      if (one(random)) ++accepted;
    } catch (const CorruptionError& error) {
      if (std::string(error.what()).size() > 1000) ADD_FAILURE() << "a long text: " << error.what();
    }
    if (::testing::Test::HasFailure()) return;
  }
  std::printf("%s: %llu of %llu inputs were accepted\n", test, static_cast<unsigned long long>(accepted),
              static_cast<unsigned long long>(seed - first));
  EXPECT_GT(accepted, 0U);
  EXPECT_LT(accepted, seed - first);
}

// The checksum that makes a manifest of these bytes believed.
void seal(std::vector<std::byte>& manifest) {
  const auto pool = offload::make_inline_pool();
  const std::uint64_t checksum = offload::checksum(*pool, manifest.data(), manifest.size());
  const std::span<const std::byte> bytes = std::as_bytes(std::span(&checksum, 1));
  manifest.insert(manifest.end(), bytes.begin(), bytes.end());
}

TEST(SafetensorsFuzz, HeadersAreReadOrRefused) {
  const std::string original =
      R"({"__metadata__":{"format":"pt"},"h.0.w":{"dtype":"F32","shape":[3,4],"data_offsets":[0,48]},)"
      R"("h.0.b":{"dtype":"BF16","shape":[5],"data_offsets":[48,58]},)"
      R"("x":{"dtype":"F16","shape":[],"data_offsets":[58,60]},)"
      R"("e":{"dtype":"I64","shape":[0,7],"data_offsets":[60,60]},)"
      R"("f":{"dtype":"F4","shape":[8],"data_offsets":[60,64]}})";
  for_seeds("SafetensorsFuzz.HeadersAreReadOrRefused", 100'000, [&](base::Random& random) {
    std::string text = original;
    mutate(random, text);
    const std::uint64_t data = random.below(8) == 0 ? random.below(200) : 64;
    const engine::SafetensorsHeader header = engine::parse_safetensors_header(text, data, "fuzz");
    std::uint64_t at = 0;
    std::set<std::string> names;
    for (const engine::SafetensorsEntry& tensor : header.tensors) {
      EXPECT_EQ(tensor.begin_bytes, at);
      EXPECT_TRUE(names.insert(tensor.name).second);
      EXPECT_EQ(tensor.elements * engine::safetensors_bits(tensor.dtype).value(),
                8 * (tensor.end_bytes - tensor.begin_bytes));
      at = tensor.end_bytes;
    }
    EXPECT_EQ(at, data);
    return true;
  });
}

TEST(SafetensorsFuzz, IndexesAreReadOrRefused) {
  const std::string original = R"({"metadata":{"total_size":1234,"more":[1,{"a":null}]},"weight_map":{)"
                               R"("h.0.w":"model-00001-of-00002.safetensors",)"
                               R"("h.0.b":"model-00002-of-00002.safetensors","x":"model-00001-of-00002.safetensors"}})";
  for_seeds("SafetensorsFuzz.IndexesAreReadOrRefused", 50'000, [&](base::Random& random) {
    std::string text = original;
    mutate(random, text);
    std::string before;
    for (const auto& [tensor, file] : engine::parse_safetensors_index(text, "fuzz")) {
      EXPECT_EQ(file.find('/'), std::string::npos);
      EXPECT_FALSE(file.empty());
      EXPECT_TRUE(before.empty() || before < tensor);
      before = tensor;
    }
    return true;
  });
}

// With its checksum made right again, so that what is behind it is reached.
TEST(SafetensorsFuzz, ManifestsAreReadOrRefused) {
  engine::StoredLayout layout;
  layout.world_size = 2;
  layout.partition = {2, 0, false};
  layout.fingerprint = engine::kNoSettings;
  for (int u = 0; u < 3; ++u) {
    engine::ParameterLayout weight;
    weight.name = "weight";
    weight.shape = {3, 5 + u};
    weight.elements = static_cast<std::uint64_t>(3 * (5 + u));
    layout.units.push_back({"u." + std::to_string(u), {weight, weight}});
    engine::StoredLayout::Chunk chunk;
    chunk.unit = static_cast<std::uint32_t>(u);
    chunk.elements = 4096;
    chunk.parameter_bytes = chunk.master_bytes = 8192;
    chunk.moment_bytes = 16384;
    chunk.offset_bytes = 4096;
    chunk.slot_bytes = 49152;
    chunk.segments = {{0, 0, weight.elements, 0}, {1, 128, weight.elements, 0}};
    layout.chunks.push_back(chunk);
  }
  engine::Manifest manifest;
  manifest.step = 41;
  manifest.user_bytes = {std::byte{1}, std::byte{2}};
  manifest.step_counts = {{41, 0}, {1, 2}, {3, 4}};
  manifest.chunks = {{1, 2, 3}, {0, 4, 5}, {1, 6, 7}};
  const std::vector<std::byte> layout_bytes = engine::encode_layout(layout);
  const std::vector<std::byte> bytes = engine::encode_manifest(layout_bytes, manifest);
  for_seeds("SafetensorsFuzz.ManifestsAreReadOrRefused", 50'000, [&](base::Random& random) {
    std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size() - 8);
    mutate(random, text);
    const auto* const first = reinterpret_cast<const std::byte*>(text.data());
    std::vector<std::byte> changed(first, first + text.size());
    seal(changed);
    engine::StoredLayout found;
    engine::Manifest read;
    engine::decode_manifest(changed, "fuzz", &found, &read);
    EXPECT_EQ(read.chunks.size(), found.chunks.size());
    EXPECT_EQ(read.step_counts.size(), found.units.size());
    for (const engine::StoredLayout::Chunk& chunk : found.chunks) EXPECT_LT(chunk.unit, found.units.size());
    return true;
  });
}

// A checkpoint on disk, its manifest changed and sealed: what can be read of it is within its bytes.
TEST(SafetensorsFuzz, CheckpointsAreReadOrRefused) {
  const TemporaryDirectory directory;
  const std::string file = directory.path() + "/x.safetensors", path = directory.path() + "/step-0";
  write_bytes(file, safetensors_bytes(R"({"u.a":{"dtype":"F32","shape":[300],"data_offsets":[0,1200]},)"
                                      R"("u.b":{"dtype":"BF16","shape":[200],"data_offsets":[1200,1600]},)"
                                      R"("v.c":{"dtype":"F16","shape":[4],"data_offsets":[1600,1608]}})",
                                      std::string(1608, '\1')));
  SafetensorsReader source(file);
  import_safetensors(source, {{"u", {{"a", {300}}, {"b", {200}}}}, {"v", {{"c", {4}}}}}, path);
  const std::string manifest = path + "/ballast-rank0.step-0.manifest";
  const std::string original = bytes_of(manifest);
  for_seeds("SafetensorsFuzz.CheckpointsAreReadOrRefused", 5'000, [&](base::Random& random) {
    std::string text = original.substr(0, original.size() - 8);
    if (random.below(4) == 0) {
      mutate(random, text);
    } else {  // one of the numbers
      text[20 + random.below(text.size() - 20)] = static_cast<char>(random.below(256));
    }
    const auto* const first = reinterpret_cast<const std::byte*>(text.data());
    std::vector<std::byte> changed(first, first + text.size());
    seal(changed);
    write_bytes(manifest, {reinterpret_cast<const char*>(changed.data()), changed.size()});
    try {
      CheckpointReader reader({path});
      for (std::size_t i = 0; i < reader.parameters().size(); ++i) {
        const std::int64_t elements = reader.parameters()[i].elements;
        EXPECT_LE(elements, 4096 * 4);
        std::vector<float> values(static_cast<std::size_t>(elements)), more(values.size());
        reader.read(i, 0, values);
        reader.read_moments(i, 0, values, more);
        reader.read_published(i, 0, elements, reinterpret_cast<std::byte*>(more.data()));
      }
    } catch (const IoError&) {  // a file that ends before what the manifest says
    } catch (const ConfigError&) {
    }
    return true;
  });
}

}  // namespace
}  // namespace ballast::testing
