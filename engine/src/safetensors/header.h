// The header of a safetensors file: eight bytes with the length of a JSON text, that text, then the tensors. Pure:
// bytes in, checked values out. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ballast::engine {

// Other readers have the same limit.
constexpr std::uint64_t kSafetensorsHeaderBytesMax = 100'000'000;
constexpr std::uint64_t kSafetensorsIndexBytesMax = 1'000'000'000;  // it names the tensors of all files
constexpr const char* kSafetensorsMetadata = "__metadata__";        // reserved among the names

struct SafetensorsEntry {
  std::string name, dtype;
  std::vector<std::int64_t> shape;
  std::uint64_t elements = 0;
  std::uint64_t begin_bytes = 0, end_bytes = 0;  // within what follows the header
};
struct SafetensorsHeader {
  std::vector<std::pair<std::string, std::string>> metadata;
  std::vector<SafetensorsEntry> tensors;  // in the order of their bytes
};

// Bits of one element; nothing for a name that the format does not know.
std::optional<std::uint64_t> safetensors_bits(std::string_view dtype);

// `text`: the JSON; `data_bytes`: how many follow it in the file. Throws CorruptionError naming `file` and the tensor
// or byte. Every byte of the data belongs to exactly one tensor.
SafetensorsHeader parse_safetensors_header(std::string_view text, std::uint64_t data_bytes, const std::string& file);

// model.safetensors.index.json: tensor and file of each, sorted by tensor. File names have no folder.
std::vector<std::pair<std::string, std::string>> parse_safetensors_index(std::string_view text,
                                                                         const std::string& file);

}  // namespace ballast::engine
