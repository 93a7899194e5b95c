// A checkpoint's parameters as safetensors files.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/engine/safetensors.h>
#include <ballast/io/small_files.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "durable/checkpoints.h"
#include "json_value.h"
#include "safetensors/files.h"
#include "safetensors/header.h"

namespace ballast {
namespace {

constexpr std::int64_t kPieceElements = std::int64_t{1} << 20;
constexpr const char* kIndex = "model.safetensors.index.json";

const char* dtype_name(DataType type) {
  return type == DataType::bf16 ? "BF16" : type == DataType::fp16 ? "F16" : "F32";
}

std::string shard_name(std::size_t shard, std::size_t shards) {
  if (shards == 1) return "model.safetensors";
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", shard + 1, shards);
  return name;
}

struct Output {
  std::string name;
  DataType dtype = DataType::bf16;
  std::uint64_t bytes = 0;
};

nlohmann::ordered_json header_entry(const StoredParameter& parameter, const Output& output, std::uint64_t at) {
  return {{"dtype", dtype_name(output.dtype)}, {"shape", parameter.shape}, {"data_offsets", {at, at + output.bytes}}};
}

// No two sets of files are mixed: what is there must be what will be replaced.
void require_own_folder(const std::string& folder, std::size_t shards) {
  std::set<std::string> ours = {kIndex};
  for (std::size_t s = 0; s < shards; ++s) ours.insert(shard_name(s, shards));
  const auto files = io::make_small_files(folder);
  for (const std::string& name : files->list()) {
    const bool safetensors = name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json");
    if (safetensors && !ours.contains(name)) {
      throw ConfigError(folder + " holds " + json::printable(name) + " of another export; name another folder");
    }
  }
  files->remove(kIndex);  // an export that ends early must not look whole
  files->flush_directory();
}

}  // namespace

int export_safetensors(CheckpointReader& from, const std::string& folder, const ExportOptions& options) {
  const std::vector<StoredParameter>& parameters = from.parameters();
  std::vector<Output> outputs;
  std::set<std::string> seen;
  std::vector<std::vector<std::size_t>> shards(1);
  std::uint64_t shard_bytes = 0, header_bytes = 0, total = 0, all_header_bytes = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const StoredParameter& parameter = parameters[i];
    Output output;
    output.name = options.name ? options.name(parameter) : parameter.unit + "." + parameter.name;
    output.dtype = options.exact ? DataType::fp32 : parameter.dtype;
    output.bytes = static_cast<std::uint64_t>(parameter.elements) * element_bytes(output.dtype);
    if (output.name == engine::kSafetensorsMetadata) {
      throw ConfigError("a tensor cannot be named " + json::printable(output.name) + ": the format has reserved it");
    }
    if (!seen.insert(output.name).second) {
      throw ConfigError("two tensors would be named " + json::printable(output.name));
    }
    std::uint64_t entry_bytes = 0;
    try {
      entry_bytes = nlohmann::ordered_json(output.name).dump().size() + 64;
      entry_bytes += header_entry(parameter, output, std::uint64_t{1} << 53).dump().size();
    } catch (const nlohmann::json::type_error&) {
      throw ConfigError("a tensor's name " + json::printable(output.name) + " is no UTF-8, which safetensors want");
    }
    if (entry_bytes > engine::kSafetensorsHeaderBytesMax - 1024) {
      throw ConfigError("a tensor's name of " + std::to_string(output.name.size()) + " bytes, " +
                        json::printable(output.name) + ", does not fit into a header");
    }
    const bool full = shard_bytes + output.bytes > options.shard_bytes ||
                      header_bytes + entry_bytes > engine::kSafetensorsHeaderBytesMax - 1024;
    if (!shards.back().empty() && full) {
      shards.emplace_back();
      shard_bytes = header_bytes = 0;
    }
    shards.back().push_back(i);
    shard_bytes += output.bytes;
    header_bytes += entry_bytes;
    all_header_bytes += entry_bytes;
    total += output.bytes;
    outputs.push_back(std::move(output));
  }
  // An entry of the index is shorter than one of a header. What readers refuse is not written.
  if (shards.size() > 1 && all_header_bytes > engine::kSafetensorsIndexBytesMax - 1024) {
    throw ConfigError("the names of " + std::to_string(outputs.size()) + " tensors take more than " +
                      std::to_string(engine::kSafetensorsIndexBytesMax) + " bytes, the most of an index; shorten them");
  }
  engine::make_folder(folder);
  const engine::FolderLock lock(folder);
  require_own_folder(folder, shards.size());
  std::vector<std::byte> piece;
  for (std::size_t s = 0; s < shards.size(); ++s) {
    // Written member by member: with a hundred thousand tensors, looking up each name would take its time.
    std::string text = R"({"__metadata__":{"format":"pt"})";
    std::uint64_t at = 0;
    for (const std::size_t i : shards[s]) {
      text += "," + nlohmann::ordered_json(outputs[i].name).dump() + ":";
      text += header_entry(parameters[i], outputs[i], at).dump();
      at += outputs[i].bytes;
    }
    text += "}";
    text.append((8 - text.size() % 8) % 8, ' ');  // tensors begin on eight bytes
    engine::WholeFile file(folder, shard_name(s, shards.size()), sizeof(std::uint64_t) + text.size() + at);
    const std::uint64_t length = text.size();
    file.write(&length, sizeof length);
    file.write(text.data(), text.size());
    for (const std::size_t i : shards[s]) {
      for (std::int64_t first = 0; first < parameters[i].elements; first += kPieceElements) {
        if (options.check_interrupt) options.check_interrupt();
        const std::int64_t count = std::min(kPieceElements, parameters[i].elements - first);
        piece.resize(static_cast<std::size_t>(count) * element_bytes(outputs[i].dtype));
        if (options.exact) {
          from.read(i, first, {reinterpret_cast<float*>(piece.data()), static_cast<std::size_t>(count)});
        } else {
          from.read_published(i, first, count, piece.data());
        }
        file.write(piece.data(), piece.size());
      }
    }
    file.publish();
  }
  if (shards.size() > 1) {
    std::string text = "{\n  \"metadata\": {\"total_size\": " + std::to_string(total) + "},\n  \"weight_map\": {";
    const char* between = "\n    ";
    for (std::size_t s = 0; s < shards.size(); ++s) {
      for (const std::size_t i : shards[s]) {
        text += between + nlohmann::ordered_json(outputs[i].name).dump() + ": \"" + shard_name(s, shards.size()) + "\"";
        between = ",\n    ";
      }
    }
    text += "\n  }\n}\n";
    engine::WholeFile file(folder, kIndex, text.size());
    file.write(text.data(), text.size());
    file.publish();
  }
  io::make_small_files(folder)->flush_directory();
  return static_cast<int>(shards.size());
}

}  // namespace ballast
