// Safetensors files and folders of them, opened and read.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/engine/safetensors.h>
#include <ballast/kernels/convert.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>

#include "json_value.h"
#include "safetensors/files.h"
#include "safetensors/header.h"

namespace ballast {

using engine::InputFile;

namespace {

constexpr const char* kSuffix = ".safetensors";
constexpr const char* kIndexSuffix = ".safetensors.index.json";
constexpr std::size_t kPieceElements = std::size_t{1} << 16;

// The whole of a text that is not longer than it may be.
std::string text_of(const InputFile& file, std::uint64_t offset_bytes, std::uint64_t bytes) {
  std::string text(bytes, '\0');
  file.read(offset_bytes, text.data(), bytes);
  return text;
}

engine::SafetensorsHeader header_of(const InputFile& file, std::uint64_t* data_begin) {
  const std::string sizes = file.path() + " has " + std::to_string(file.bytes()) + " bytes, ";
  if (file.bytes() < 8) throw CorruptionError(sizes + "and a safetensors file begins with eight: it is cut short");
  std::uint64_t length = 0;
  file.read(0, &length, sizeof length);
  const std::string said = sizes + "and would begin with a header of " + std::to_string(length) + ": ";
  if (length > engine::kSafetensorsHeaderBytesMax) {
    throw CorruptionError(said + "beyond the limit of " + std::to_string(engine::kSafetensorsHeaderBytesMax) +
                          ", so it is no safetensors file");
  }
  if (length > file.bytes() - 8) throw CorruptionError(said + "it is cut short");
  *data_begin = 8 + length;
  return engine::parse_safetensors_header(text_of(file, 8, length), file.bytes() - *data_begin, file.path());
}

std::vector<std::string> names_in(const std::string& folder, const char* suffix) {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    std::string name = at->path().filename().string();
    if (name.ends_with(suffix)) names.push_back(std::move(name));
  }
  if (error) throw IoError(folder + " cannot be listed: " + error.message());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

struct SafetensorsReader::Implementation {
  std::vector<InputFile> files;
  std::vector<SafetensorsTensor> tensors;
  std::vector<std::size_t> file_of;  // of each tensor
  std::vector<std::pair<std::string, std::string>> metadata;
  std::vector<std::uint16_t> narrow;

  // All that is in the file.
  std::vector<std::pair<SafetensorsTensor, std::size_t>> open(const std::string& path) {
    const InputFile& file = files.emplace_back(path);
    std::uint64_t data_begin = 0;
    engine::SafetensorsHeader header = header_of(file, &data_begin);
    if (files.size() == 1) metadata = std::move(header.metadata);
    std::vector<std::pair<SafetensorsTensor, std::size_t>> found;
    for (engine::SafetensorsEntry& entry : header.tensors) {
      found.push_back({{std::move(entry.name), std::move(entry.dtype), std::move(entry.shape),
                        static_cast<std::int64_t>(entry.elements), path, data_begin + entry.begin_bytes,
                        entry.end_bytes - entry.begin_bytes},
                       files.size() - 1});
    }
    return found;
  }
  void open_index(const std::string& folder, const std::string& name) {
    const InputFile index(folder + "/" + name);
    if (index.bytes() > engine::kSafetensorsIndexBytesMax) {
      throw CorruptionError(index.path() + " has " + std::to_string(index.bytes()) + " bytes, beyond the limit of " +
                            std::to_string(engine::kSafetensorsIndexBytesMax));
    }
    const auto map = engine::parse_safetensors_index(text_of(index, 0, index.bytes()), index.path());
    std::map<std::string, std::size_t> counts;  // of the tensors that the index says are there
    for (const auto& [tensor, file] : map) ++counts[file];
    std::vector<std::pair<SafetensorsTensor, std::size_t>> all;
    for (const auto& [file, count] : counts) {
      auto found = open(folder + "/" + file);
      for (auto& each : found) {
        const auto at = std::lower_bound(map.begin(), map.end(), std::pair(each.first.name, std::string()));
        if (at == map.end() || at->first != each.first.name || at->second != file) {
          throw CorruptionError(each.first.file + " holds tensor " + json::printable(each.first.name) + ", and " +
                                index.path() + " does not say so");
        }
        all.push_back(std::move(each));
      }
      if (found.size() != count) {
        throw CorruptionError(folder + "/" + file + " holds " + std::to_string(found.size()) + " tensors, and " +
                              index.path() + " says " + std::to_string(count));
      }
    }
    take(std::move(all));
  }
  void take(std::vector<std::pair<SafetensorsTensor, std::size_t>> all) {
    std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.first.name < b.first.name; });
    for (auto& [tensor, file] : all) {
      tensors.push_back(std::move(tensor));
      file_of.push_back(file);
    }
  }
};

SafetensorsReader::SafetensorsReader(const std::string& path) : implementation_(std::make_unique<Implementation>()) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) {
    implementation_->take(implementation_->open(path));
    return;
  }
  const std::vector<std::string> files = names_in(path, kSuffix), indexes = names_in(path, kIndexSuffix);
  if (indexes.size() == 1) {
    implementation_->open_index(path, indexes.front());
  } else if (indexes.size() > 1) {
    throw IoError(path + " holds " + std::to_string(indexes.size()) + " indexes of safetensors files");
  } else if (files.size() == 1) {
    implementation_->take(implementation_->open(path + "/" + files.front()));
  } else {
    throw IoError(path + (files.empty() ? " holds no safetensors file"
                                        : " holds " + std::to_string(files.size()) +
                                              " safetensors files and no index of them; name one of them"));
  }
}

SafetensorsReader::~SafetensorsReader() = default;
SafetensorsReader::SafetensorsReader(SafetensorsReader&&) noexcept = default;

const std::vector<SafetensorsTensor>& SafetensorsReader::tensors() const { return implementation_->tensors; }
const std::vector<std::pair<std::string, std::string>>& SafetensorsReader::metadata() const {
  return implementation_->metadata;
}

std::optional<std::size_t> SafetensorsReader::find(std::string_view name) const {
  const std::vector<SafetensorsTensor>& all = tensors();
  const auto at = std::lower_bound(all.begin(), all.end(), name,
                                   [](const SafetensorsTensor& tensor, std::string_view n) { return tensor.name < n; });
  if (at == all.end() || at->name != name) return std::nullopt;
  return static_cast<std::size_t>(at - all.begin());
}

void SafetensorsReader::read(std::size_t index, std::int64_t first_element, std::span<float> values) {
  Implementation& self = *implementation_;
  if (index >= self.tensors.size()) throw UsageError("there is no tensor " + std::to_string(index));
  const SafetensorsTensor& tensor = self.tensors[index];
  const auto first = static_cast<std::uint64_t>(first_element), elements = static_cast<std::uint64_t>(tensor.elements);
  if (first_element < 0 || first > elements || values.size() > elements - first) {
    throw UsageError("elements from " + std::to_string(first_element) + " on, " + std::to_string(values.size()) +
                     " of them, of tensor " + json::printable(tensor.name) + ", which has " + std::to_string(elements));
  }
  const std::optional<DataType> type = parameter_type(tensor);
  if (!type) {
    throw ConfigError(tensor.file + ": tensor " + json::printable(tensor.name) + " is of " + tensor.dtype +
                      "; parameters can be F32, F16 or BF16");
  }
  const InputFile& file = self.files[self.file_of[index]];
  if (*type == DataType::fp32) {
    file.read(tensor.offset_bytes + first * 4, values.data(), values.size() * 4);
    return;
  }
  // The tensor may begin at any byte, and is aligned in memory.
  self.narrow.resize(kPieceElements);
  for (std::size_t done = 0; done < values.size();) {
    const std::size_t count = std::min(kPieceElements, values.size() - done);
    file.read(tensor.offset_bytes + (first + done) * 2, self.narrow.data(), count * 2);
    if (*type == DataType::bf16) {
      kernels::bf16_to_fp32(self.narrow.data(), values.data() + done, count);
    } else {
      kernels::fp16_to_fp32(self.narrow.data(), values.data() + done, count);
    }
    done += count;
  }
}

std::optional<DataType> parameter_type(const SafetensorsTensor& tensor) {
  if (tensor.dtype == "F32") return DataType::fp32;
  if (tensor.dtype == "BF16") return DataType::bf16;
  if (tensor.dtype == "F16") return DataType::fp16;
  return std::nullopt;
}

}  // namespace ballast
