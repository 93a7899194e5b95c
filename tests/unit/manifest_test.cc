// Manifests: what is written comes back, and nothing else is believed.
// SPDX-License-Identifier: Apache-2.0
#include "durable/manifest.h"

#include <ballast/base/error.h>
#include <ballast/base/random.h>
#include <ballast/io/chunk_store.h>
#include <ballast/offload/chunk_work.h>
#include <ballast/offload/cpu_pool.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "durable/stored_state.h"
#include "stress/allocation_counter.h"
#include "support/fuzz.h"
#include "support/io_support.h"
#include "support/synthetic_trainer.h"

namespace ballast::engine {
namespace {

StoredLayout small_layout() {
  StoredLayout layout;
  layout.run_identity[3] = 7;
  layout.world_size = 2;
  layout.rank = 1;
  layout.partition = {2, 1, false};
  layout.fingerprint = R"({"optimizer":{}})";
  ParameterLayout weight;
  weight.name = "weight";
  weight.shape = {3, 5};
  weight.elements = 15;
  ParameterLayout bias;
  bias.name = "bias";
  bias.shape = {};
  bias.elements = 1;
  bias.dtype = DataType::fp32;
  bias.trainable = false;
  layout.units = {{"a/b", {weight, bias}}, {"c", {}}};
  StoredLayout::Chunk chunk;
  chunk.elements = 2048;
  chunk.parameter_bytes = chunk.master_bytes = 4096;
  chunk.moment_bytes = 8192;
  chunk.offset_bytes = 4096;
  chunk.slot_bytes = 24576;
  chunk.segments = {{0, 0, 15, 0}};
  layout.chunks = {chunk};
  return layout;
}

Manifest small_manifest() {
  Manifest manifest;
  manifest.step = 41;
  manifest.loss_scale = {1024, 3, 1};
  manifest.user_bytes = {std::byte{1}, std::byte{2}, std::byte{3}};
  manifest.step_counts = {{41, 0}, {}};
  manifest.chunks = {{1, 0x1234, 0x5678}};
  return manifest;
}

TEST(Manifest, WhatIsWrittenComesBack) {
  const std::vector<std::byte> layout = encode_layout(small_layout());
  const std::vector<std::byte> bytes = encode_manifest(layout, small_manifest());
  StoredLayout found;
  Manifest manifest;
  decode_manifest(bytes, "it", &found, &manifest);
  EXPECT_EQ(encode_layout(found), layout);
  EXPECT_EQ(encode_manifest(layout, manifest), bytes);
  EXPECT_EQ(manifest.step, 41U);
  EXPECT_EQ(manifest.step_counts[0][0], 41U);
  EXPECT_EQ(found.units[0].parameters[1].dtype, DataType::fp32);
}

TEST(Manifest, CutAnywhereOrWithAnyBitFlippedIsRefused) {
  const std::vector<std::byte> bytes = encode_manifest(encode_layout(small_layout()), small_manifest());
  StoredLayout layout;
  Manifest manifest;
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_THROW(decode_manifest(std::span(bytes).first(length), "it", &layout, &manifest), CorruptionError) << length;
  }
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::vector<std::byte> damaged = bytes;
    damaged[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    EXPECT_THROW(decode_manifest(damaged, "it", &layout, &manifest), CorruptionError) << bit;
  }
}

// Bytes set to what integers turn over at, runs that are cut out, doubled or swapped, whole numbers put in.
std::vector<std::byte> mutated(std::vector<std::byte> bytes, base::Random& random) {
  constexpr std::uint64_t kEdges[] = {0,
                                      1,
                                      2,
                                      UINT8_MAX,
                                      INT32_MAX,
                                      UINT32_MAX,
                                      INT64_MAX,
                                      UINT64_MAX,
                                      std::uint64_t{1} << 50,
                                      std::uint64_t{1} << 62,
                                      4096,
                                      UINT64_MAX - 7};
  for (std::uint64_t changes = 1 + random.below(4); changes > 0 && !bytes.empty(); --changes) {
    const std::size_t at = random.below(bytes.size());
    const std::size_t length = std::min<std::size_t>(1 + random.below(40), bytes.size() - at);
    const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(at),
               end = begin + static_cast<std::ptrdiff_t>(length);
    switch (random.below(7)) {
      case 0:
        bytes[at] = static_cast<std::byte>(random.next());
        break;
      case 1:
        bytes[at] ^= static_cast<std::byte>(1U << random.below(8));
        break;
      case 2: {
        const std::uint64_t value = kEdges[random.below(std::size(kEdges))];
        std::memcpy(&bytes[at], &value, std::min(length, sizeof value));
        break;
      }
      case 3:
        bytes.erase(begin, end);
        break;
      case 4: {
        const std::vector<std::byte> copy(begin, end);
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(random.below(bytes.size())), copy.begin(), copy.end());
        break;
      }
      case 5:
        bytes.resize(at);
        break;
      default:
        std::reverse(begin, end);
    }
  }
  return bytes;
}

// With the right checksum, so that the decoder itself is what refuses.
TEST(Manifest, WhatCannotBeIsRefusedWithoutAskingForItsMemory) {
  const test::Seed seed(1);
  base::Random random(seed.value());
  const std::vector<std::byte> good = encode_layout(small_layout());
  std::uint64_t believed = 0;
  for (std::uint64_t i = 0; test::fuzz_goes_on(i, 20'000); ++i) {
    // The layout, or all that the checksum covers.
    std::vector<std::byte> bytes;
    if (random.below(2) == 0) {
      bytes = encode_manifest(mutated(good, random), small_manifest());
    } else {
      bytes = encode_manifest(good, small_manifest());
      bytes.resize(bytes.size() - 8);
      std::vector<std::byte> rest(bytes.begin() + 12, bytes.end());
      rest = mutated(std::move(rest), random);
      bytes.resize(12);
      bytes.insert(bytes.end(), rest.begin(), rest.end());
      const auto pool = offload::make_inline_pool();
      const std::uint64_t checksum = offload::checksum(*pool, bytes.data(), bytes.size());
      bytes.resize(bytes.size() + 8);
      std::memcpy(bytes.data() + bytes.size() - 8, &checksum, 8);
    }
    StoredLayout found;
    Manifest manifest;
    testing::largest_allocation = 0;
    try {
      decode_manifest(bytes, "it", &found, &manifest);
    } catch (const CorruptionError&) {
      ASSERT_LE(testing::largest_allocation, 16 * bytes.size() + 4096) << "round " << i;
      continue;
    }
    ++believed;
    ASSERT_LE(testing::largest_allocation, 16 * bytes.size() + 4096) << "round " << i;
    for (const StoredLayout::Chunk& chunk : found.chunks) ASSERT_LT(chunk.unit, found.units.size());
    ASSERT_EQ(manifest.chunks.size(), found.chunks.size());
    ASSERT_EQ(manifest.step_counts.size(), found.units.size());
  }
  EXPECT_GT(believed, 0U) << "values that are possible must be believed";
}

// A state that is read as a later run would, with a manifest that somebody has changed and sealed again: what is in the
// chunk file, or an error that says what is wrong; nothing outside it, and no memory that the file could not fill.
TEST(Manifest, WhatIsBelievedIsReadWithinItsFile) {
  const testing::TemporaryDirectory directory;
  const test::Seed seed(2);
  base::Random random(seed.value());
  const std::shared_ptr<io::SmallFiles> files = io::make_small_files(directory.path());
  StoredLayout good = small_layout();
  good.world_size = 1;
  good.rank = 0;
  good.partition = {1, 0, false};
  good.units[0].parameters.pop_back();
  const std::uint64_t file_bytes = good.chunks[0].offset_bytes + 2 * good.chunks[0].slot_bytes;
  std::vector<std::byte> chunks(file_bytes);
  for (std::byte& byte : chunks) byte = static_cast<std::byte>(random.next());
  files->write(io::ChunkStore::file_name(0), chunks);
  const std::vector<std::byte> layout = encode_layout(good);
  std::uint64_t read = 0;
  for (std::uint64_t i = 0; test::fuzz_goes_on(i, 3000); ++i) {
    Manifest manifest = small_manifest();
    manifest.step_counts = {{41}, {}};
    const std::vector<std::byte> changed = i == 0 ? layout : mutated(layout, random);
    std::vector<std::byte> sealed = encode_manifest(changed, manifest);
    StoredLayout found;
    Manifest decoded;
    try {
      decode_manifest(sealed, "it", &found, &decoded);
      // Sealed with the checksums of what it now says is a chunk, where that is there.
      for (std::size_t c = 0; c < found.chunks.size(); ++c) {
        const StoredLayout::Chunk& chunk = found.chunks[c];
        const std::uint64_t begin = chunk.offset_bytes + decoded.chunks[c].slot * chunk.slot_bytes;
        if (begin > file_bytes || chunk.stored_bytes() > file_bytes - begin) continue;
        const auto pool = offload::make_inline_pool();
        decoded.chunks[c].parameter_checksum = offload::checksum(*pool, chunks.data() + begin, chunk.parameter_bytes);
        decoded.chunks[c].optimizer_checksum = offload::checksum(*pool, chunks.data() + begin + chunk.parameter_bytes,
                                                                 chunk.stored_bytes() - chunk.parameter_bytes);
      }
      sealed = encode_manifest(changed, decoded);
    } catch (const CorruptionError&) {
    }
    files->write("ballast-rank0.step-41.manifest", sealed);
    testing::largest_allocation = 0;
    try {
      StoredState state({directory.path()}, 41);
      state.verify();
      std::vector<float> values, exp_avg, exp_avg_sq;
      for (std::uint32_t u = 0; u < state.layout().units.size(); ++u) {
        for (std::uint32_t p = 0; p < state.layout().units[u].parameters.size(); ++p) {
          const std::uint64_t elements = state.layout().units[u].parameters[p].elements;
          ASSERT_LE(elements, file_bytes) << "round " << i;
          for (std::vector<float>* each : {&values, &exp_avg, &exp_avg_sq}) each->assign(elements, 0.0F);
          state.read(u, p, 0, values, exp_avg, exp_avg_sq);
        }
      }
      ++read;
    } catch (const CorruptionError&) {
    } catch (const IoError&) {
    } catch (const ConfigError&) {
    }
    ASSERT_LE(testing::largest_allocation, 4 * file_bytes + 16 * sealed.size() + 65536) << "round " << i;
  }
  EXPECT_GT(read, 0U) << "the unchanged one at least";
}

TEST(Manifest, TheNewestTwoStayAndLeftoversGo) {
  const testing::TemporaryDirectory directory;
  const std::shared_ptr<io::SmallFiles> files = io::make_small_files(directory.path());
  const std::vector<std::byte> layout = encode_layout(small_layout());
  ManifestLog log(files, 1);
  files->write("ballast-rank1.step-9.manifest.new", {});
  files->write("ballast-rank1.step-x.manifest", {});
  files->write("ballast-rank12.step-3.manifest", {});
  for (const std::uint64_t step : {1, 2, 9, 10}) {
    Manifest manifest = small_manifest();
    manifest.step = step;
    log.publish(layout, manifest);
  }
  EXPECT_EQ(log.steps(), (std::vector<std::uint64_t>{10, 9}));
  EXPECT_EQ(files->list(),
            (std::vector<std::string>{"ballast-rank1.step-10.manifest", "ballast-rank1.step-9.manifest",
                                      "ballast-rank1.step-x.manifest", "ballast-rank12.step-3.manifest"}));
  EXPECT_EQ(ManifestLog::ranks_of(*files, 3), std::vector<std::uint32_t>{12});
  EXPECT_EQ(ManifestLog::steps_of(*files), (std::vector<std::uint64_t>{10, 9, 3}));
  StoredLayout found;
  Manifest manifest;
  EXPECT_THROW(ManifestLog(files, 12).load(3, &found, &manifest), CorruptionError);
  EXPECT_THROW(log.load(8, &found, &manifest), IoError);
  log.remove_all();
  EXPECT_TRUE(log.steps().empty());
}

}  // namespace
}  // namespace ballast::engine
