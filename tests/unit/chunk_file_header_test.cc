// Headers of chunk files: what is written is read, and nothing else is believed.
// SPDX-License-Identifier: Apache-2.0
#include "chunk_file_header.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <xxhash.h>

#include <cstring>
#include <vector>

#include "support/fuzz.h"
#include "support/io_support.h"

namespace ballast::io {
namespace {

using ::testing::HasSubstr;

ChunkFileHeader sample() {
  ChunkFileHeader header;
  for (std::size_t i = 0; i < 16; ++i) header.run_identity[i] = static_cast<std::uint8_t>(i * 7);
  header.owner_process = 4321;
  header.rank = 3;
  header.path_index = 1;
  header.path_count = 2;
  header.slots_per_chunk = 2;
  header.chunk_count = std::uint64_t{1} << 33;
  header.alignment_bytes = 4096;
  header.file_bytes = std::uint64_t{1} << 42;
  header.geometry_checksum = 0x0123456789abcdef;
  return header;
}

void seal(HeaderBlock& block) {
  const std::uint64_t checksum = XXH3_64bits(block.data(), 4088);
  for (std::size_t i = 0; i < 8; ++i) block[4088 + i] = static_cast<std::byte>(checksum >> (8 * i));
}

TEST(ChunkFileHeader, WhatIsEncodedIsDecoded) {
  ChunkFileHeader found;
  std::string reason;
  ASSERT_TRUE(decode_header(encode_header(sample()), &found, &reason)) << reason;
  EXPECT_TRUE(found.same_contents(sample()));
  EXPECT_EQ(found.owner_process, 4321u);
}

TEST(ChunkFileHeader, TheBytesOnDiskAreFixed) {
  const HeaderBlock block = encode_header(sample());
  EXPECT_EQ(std::memcmp(block.data(), "BALLAST\0\1\0\0\0\0\x10\0\0", 16), 0);
  EXPECT_EQ(block[32], std::byte{3});
  EXPECT_EQ(block[60], std::byte{2});  // chunk count 2^33
  EXPECT_EQ(block[80], std::byte{0xef});
}

TEST(ChunkFileHeader, EachSingleBitThatFlipsIsNoticed) {
  const HeaderBlock whole = encode_header(sample());
  for (std::size_t bit = 0; bit < whole.size() * 8; ++bit) {
    HeaderBlock damaged = whole;
    damaged[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    ChunkFileHeader found;
    std::string reason;
    ASSERT_FALSE(decode_header(damaged, &found, &reason)) << "bit " << bit;
    ASSERT_FALSE(reason.empty());
  }
}

TEST(ChunkFileHeader, EveryShorterLengthIsRefused) {
  const HeaderBlock whole = encode_header(sample());
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    // On the heap and exactly as long, so that a sanitizer sees a read beyond the end.
    const std::vector<std::byte> part(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(bytes));
    ChunkFileHeader found;
    std::string reason;
    ASSERT_FALSE(decode_header(part, &found, &reason));
  }
}

TEST(ChunkFileHeader, AnotherFormatVersionIsNamed) {
  HeaderBlock block = encode_header(sample());
  block[8] = std::byte{2};
  seal(block);
  ChunkFileHeader found;
  std::string reason;
  EXPECT_FALSE(decode_header(block, &found, &reason));
  EXPECT_THAT(reason, HasSubstr("version is 2"));
}

TEST(ChunkFileHeader, ARightChecksumDoesNotMakeImpossibleValuesPossible) {
  const auto refused = [](auto change) {
    ChunkFileHeader header = sample();
    change(header);
    ChunkFileHeader found;
    std::string reason;
    return !decode_header(encode_header(header), &found, &reason) && !reason.empty();
  };
  EXPECT_TRUE(refused([](ChunkFileHeader& h) { h.path_index = 2; }));
  EXPECT_TRUE(refused([](ChunkFileHeader& h) { h.path_count = 0; }));
  EXPECT_TRUE(refused([](ChunkFileHeader& h) { h.slots_per_chunk = 0; }));
  EXPECT_TRUE(refused([](ChunkFileHeader& h) { h.slots_per_chunk = 3; }));
  EXPECT_TRUE(refused([](ChunkFileHeader& h) { h.alignment_bytes = 0; }));
  EXPECT_TRUE(refused([](ChunkFileHeader& h) { h.alignment_bytes = 256; }));
  EXPECT_TRUE(refused([](ChunkFileHeader& h) { h.alignment_bytes = 4097; }));
  EXPECT_TRUE(refused([](ChunkFileHeader& h) { h.file_bytes = 4095; }));
  EXPECT_TRUE(refused([](ChunkFileHeader& h) { h.file_bytes = UINT64_MAX; }));
  EXPECT_TRUE(refused([](ChunkFileHeader& h) { h.owner_process = UINT64_MAX; }));
}

TEST(ChunkFileHeader, RandomBytesUnderARightMagicAndChecksumNeverMeanMoreThanTheyMay) {
  const test::Seed seed(23);
  base::Random random(seed.value());
  int accepted = 0;
  for (std::uint64_t round = 0; test::fuzz_goes_on(round, 50'000); ++round) {
    HeaderBlock block = encode_header(sample());
    const std::uint64_t changes = 1 + random.below(4);
    for (std::uint64_t i = 0; i < changes; ++i) {
      // Mostly fields; values near the edges of what integers hold.
      const std::size_t at = random.below(8) == 0 ? random.below(4088) : 8 + random.below(90);
      constexpr std::array<unsigned char, 6> edges = {0x00, 0x01, 0x7f, 0x80, 0xfe, 0xff};
      block[at] = static_cast<std::byte>(edges[random.below(edges.size())]);
    }
    seal(block);
    ChunkFileHeader found;
    std::string reason;
    if (!decode_header(block, &found, &reason)) continue;
    ++accepted;
    EXPECT_LT(found.path_index, found.path_count);
    EXPECT_TRUE(found.slots_per_chunk == 1 || found.slots_per_chunk == 2);
    EXPECT_GE(found.file_bytes, kHeaderBytes);
    EXPECT_EQ(encode_header(found), block) << "what is accepted is understood whole";
  }
  EXPECT_GT(accepted, 0) << "values that are possible must be accepted";
}

TEST(ChunkFileHeader, TheGeometryChecksumTellsLengthsAndTheirOrderApart) {
  const std::vector<std::uint64_t> a = {1, 2}, b = {2, 1}, c = {1, 2, 0}, d = {};
  EXPECT_NE(geometry_checksum(a), geometry_checksum(b));
  EXPECT_NE(geometry_checksum(a), geometry_checksum(c));
  EXPECT_NE(geometry_checksum(a), geometry_checksum(d));
}

}  // namespace
}  // namespace ballast::io
