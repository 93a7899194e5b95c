// Manifests: what is written comes back, and nothing else is believed.
// SPDX-License-Identifier: Apache-2.0
#include "durable/manifest.h"

#include <ballast/base/error.h>
#include <ballast/base/random.h>
#include <gtest/gtest.h>

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

// With the right checksum, so that the decoder itself is what refuses.
TEST(Manifest, WhatCannotBeIsRefusedWithoutAskingForItsMemory) {
  base::Random random(1);
  const std::vector<std::byte> good = encode_layout(small_layout());
  for (int i = 0; i < 20000; ++i) {
    std::vector<std::byte> layout = good;
    const std::uint64_t changes = 1 + random.below(4);
    for (std::uint64_t k = 0; k < changes; ++k) {
      layout[random.below(layout.size())] = static_cast<std::byte>(random.below(2) == 0 ? 0xff : random.next());
    }
    if (random.below(4) == 0) layout.resize(random.below(layout.size()));
    StoredLayout found;
    Manifest manifest;
    try {
      decode_manifest(encode_manifest(layout, small_manifest()), "it", &found, &manifest);
    } catch (const CorruptionError&) {
      continue;
    }
    // Believed: then everything in it can be used.
    for (const StoredLayout::Chunk& chunk : found.chunks) EXPECT_LT(chunk.unit, found.units.size());
  }
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
