// The header of a chunk file: whose it is, and how it is laid out. Fixed little-endian bytes; the decoder trusts
// nothing. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace ballast::io {

constexpr std::uint64_t kHeaderBytes = 4096;
constexpr std::uint32_t kHeaderFormatVersion = 1;

struct ChunkFileHeader {
  std::array<std::uint8_t, 16> run_identity{};
  std::uint64_t owner_process = 0;  // holds the lock, or 0 after a normal close that kept the file
  std::uint32_t rank = 0;
  std::uint32_t path_index = 0;
  std::uint32_t path_count = 0;
  std::uint32_t slots_per_chunk = 0;
  std::uint64_t chunk_count = 0;  // over all paths
  std::uint64_t alignment_bytes = 0;
  std::uint64_t file_bytes = 0;         // header and extents
  std::uint64_t geometry_checksum = 0;  // over the lengths of all chunks

  // Same run and same places of everything: what lies in the extents means the same.
  bool same_contents(const ChunkFileHeader& other) const;
};

using HeaderBlock = std::array<std::byte, kHeaderBytes>;

HeaderBlock encode_header(const ChunkFileHeader& header);
// False, with the reason, for anything but a whole, undamaged header of this format version with possible values. Any
// number of bytes may be handed in.
bool decode_header(std::span<const std::byte> bytes, ChunkFileHeader* header, std::string* reason);

std::uint64_t geometry_checksum(std::span<const std::uint64_t> chunk_bytes);

}  // namespace ballast::io
