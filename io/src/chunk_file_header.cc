// Encoding and decoding of chunk file headers.
//
//   byte    0  magic "BALLAST" and a zero byte      byte   48  slots per chunk  u32
//   byte    8  format version             u32       byte   52  (zero)           u32
//   byte   12  header length, 4096        u32       byte   56  chunk count      u64
//   byte   16  run identity               16 B      byte   64  alignment        u64
//   byte   32  rank                       u32       byte   72  file length      u64
//   byte   36  path index                 u32       byte   80  geometry XXH3-64 u64
//   byte   40  path count                 u32       byte   88  owner process    u64
//   byte   44  (zero)                     u32       byte   96  zeros
//   byte 4088  XXH3-64 over bytes 0 to 4087
// SPDX-License-Identifier: Apache-2.0
#include "chunk_file_header.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace ballast::io {
namespace {

constexpr char kMagic[8] = {'B', 'A', 'L', 'L', 'A', 'S', 'T', '\0'};
constexpr std::size_t kChecksumAt = kHeaderBytes - 8;
constexpr std::size_t kUsedBytes = 96;

void put(HeaderBlock& block, std::size_t at, std::uint64_t value, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) block[at + i] = static_cast<std::byte>(value >> (8 * i));
}

std::uint64_t get(std::span<const std::byte> block, std::size_t at, std::size_t bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < bytes; ++i) value |= static_cast<std::uint64_t>(block[at + i]) << (8 * i);
  return value;
}

bool refuse(std::string* reason, std::string text) {
  *reason = std::move(text);
  return false;
}

}  // namespace

bool ChunkFileHeader::same_contents(const ChunkFileHeader& other) const {
  return run_identity == other.run_identity && rank == other.rank && path_index == other.path_index &&
         path_count == other.path_count && slots_per_chunk == other.slots_per_chunk &&
         chunk_count == other.chunk_count && alignment_bytes == other.alignment_bytes &&
         file_bytes == other.file_bytes && geometry_checksum == other.geometry_checksum;
}

HeaderBlock encode_header(const ChunkFileHeader& header) {
  HeaderBlock block{};
  std::memcpy(block.data(), kMagic, sizeof kMagic);
  put(block, 8, kHeaderFormatVersion, 4);
  put(block, 12, kHeaderBytes, 4);
  std::memcpy(block.data() + 16, header.run_identity.data(), header.run_identity.size());
  put(block, 32, header.rank, 4);
  put(block, 36, header.path_index, 4);
  put(block, 40, header.path_count, 4);
  put(block, 48, header.slots_per_chunk, 4);
  put(block, 56, header.chunk_count, 8);
  put(block, 64, header.alignment_bytes, 8);
  put(block, 72, header.file_bytes, 8);
  put(block, 80, header.geometry_checksum, 8);
  put(block, 88, header.owner_process, 8);
  put(block, kChecksumAt, XXH3_64bits(block.data(), kChecksumAt), 8);
  return block;
}

bool decode_header(std::span<const std::byte> bytes, ChunkFileHeader* header, std::string* reason) {
  if (bytes.size() < kHeaderBytes) {
    return refuse(reason,
                  "it has " + std::to_string(bytes.size()) + " bytes, a header " + std::to_string(kHeaderBytes));
  }
  if (std::memcmp(bytes.data(), kMagic, sizeof kMagic) != 0)
    return refuse(reason, "it does not begin as a chunk file does");
  // Before the checksum: another version may keep it elsewhere.
  const std::uint64_t version = get(bytes, 8, 4);
  if (version != kHeaderFormatVersion) {
    return refuse(reason, "its format version is " + std::to_string(version) + ", this program reads " +
                              std::to_string(kHeaderFormatVersion));
  }
  if (get(bytes, kChecksumAt, 8) != XXH3_64bits(bytes.data(), kChecksumAt))
    return refuse(reason, "its header's checksum is wrong");
  // A right checksum does not make values possible.
  ChunkFileHeader found;
  std::memcpy(found.run_identity.data(), bytes.data() + 16, found.run_identity.size());
  found.rank = static_cast<std::uint32_t>(get(bytes, 32, 4));
  found.path_index = static_cast<std::uint32_t>(get(bytes, 36, 4));
  found.path_count = static_cast<std::uint32_t>(get(bytes, 40, 4));
  found.slots_per_chunk = static_cast<std::uint32_t>(get(bytes, 48, 4));
  found.chunk_count = get(bytes, 56, 8);
  found.alignment_bytes = get(bytes, 64, 8);
  found.file_bytes = get(bytes, 72, 8);
  found.geometry_checksum = get(bytes, 80, 8);
  found.owner_process = get(bytes, 88, 8);
  const auto zero = [](std::byte value) { return value == std::byte{0}; };
  const bool padding = get(bytes, 44, 4) == 0 && get(bytes, 52, 4) == 0 &&
                       std::all_of(bytes.begin() + kUsedBytes, bytes.begin() + kChecksumAt, zero);
  const bool possible = padding && get(bytes, 12, 4) == kHeaderBytes && found.path_index < found.path_count &&
                        found.slots_per_chunk >= 1 && found.slots_per_chunk <= 2 && found.alignment_bytes >= 512 &&
                        std::has_single_bit(found.alignment_bytes) && found.file_bytes >= kHeaderBytes &&
                        found.file_bytes <= INT64_MAX && found.owner_process <= INT32_MAX;
  if (!possible) return refuse(reason, "its header holds impossible values");
  *header = found;
  return true;
}

std::uint64_t geometry_checksum(std::span<const std::uint64_t> chunk_bytes) {
  XXH64_hash_t checksum = 0;
  for (const std::uint64_t length : chunk_bytes) {
    std::array<std::byte, 8> encoded;
    for (std::size_t i = 0; i < encoded.size(); ++i) encoded[i] = static_cast<std::byte>(length >> (8 * i));
    checksum = XXH3_64bits_withSeed(encoded.data(), encoded.size(), checksum);
  }
  return checksum;
}

}  // namespace ballast::io
