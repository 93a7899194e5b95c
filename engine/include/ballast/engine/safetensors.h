// Parameters from and to safetensors files, streaming: a piece of one tensor in memory at a time.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/checkpoint.h>
#include <ballast/engine/engine.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ballast {

struct SafetensorsTensor {
  std::string name, dtype;  // dtype as the format spells it: "BF16"
  std::vector<std::int64_t> shape;
  std::int64_t elements = 0;
  std::string file;
  std::uint64_t offset_bytes = 0, bytes = 0;  // within the file
};

// Believes nothing that a file says before it is checked: sizes, shapes, ranges (no overlap, hole or byte too many),
// names. One thread at a time; keeps the files open.
class SafetensorsReader {
 public:
  // A file, or a folder with model.safetensors.index.json and its shards or with one safetensors file. Throws IoError
  // where it cannot be read, CorruptionError naming file, tensor and offset where it is no whole safetensors file.
  explicit SafetensorsReader(const std::string& path);
  ~SafetensorsReader();
  SafetensorsReader(SafetensorsReader&&) noexcept;

  const std::vector<SafetensorsTensor>& tensors() const;  // by name
  std::optional<std::size_t> find(std::string_view name) const;
  const std::vector<std::pair<std::string, std::string>>& metadata() const;  // of the first file
  // Elements of tensors()[index] in fp32, exact. Throws ConfigError where its dtype is none of F32, F16 and BF16,
  // UsageError beyond the end, CorruptionError where the file has become shorter, IoError.
  void read(std::size_t index, std::int64_t first_element, std::span<float> values);

 private:
  struct Implementation;
  std::unique_ptr<Implementation> implementation_;
};

// The dtype of a parameter that a tensor of that dtype can become without loss; nothing for integers and others.
std::optional<DataType> parameter_type(const SafetensorsTensor& tensor);

struct ExportOptions {
  std::uint64_t shard_bytes = std::uint64_t{4} << 30;       // of one file, at most, where a tensor alone is not larger
  std::function<std::string(const StoredParameter&)> name;  // of a tensor; empty: "unit.name"
  bool exact = false;                                       // the masters, as F32, instead of what the device has
  std::function<void()> check_interrupt = {};               // called now and then; what it throws leaves the call
};

// All parameters as safetensors in `folder` (made where missing): model.safetensors, or
// model-00001-of-0000N.safetensors and, last, model.safetensors.index.json. Each file appears whole. Returns how many
// files hold tensors. Throws ConfigError where two tensors get one name or the folder holds another set of safetensors
// files, IoError.
int export_safetensors(CheckpointReader& from, const std::string& folder, const ExportOptions& options = {});

struct ImportOptions {
  std::function<std::string(const ModelUnit&, const ParameterSpec&)> name;  // of its tensor; empty: "unit.name"
  std::function<bool(const SafetensorsTensor&)> ignore;  // of those that no parameter is made of; empty: none
  // What all parameters are rounded to, to nearest even; nothing: what the tensors are.
  std::optional<DataType> dtype;
  std::function<void()> check_interrupt = {};
};

// Makes a checkpoint in the folder `path`, replacing one of that name in one step: the parameters of `units` in that
// order, no moments, step 0. A model of the same units goes on from it with whatever settings and dtypes. Throws
// ConfigError where tensors are missing, superfluous, of another shape or of no fitting dtype, IoError,
// CorruptionError.
void import_safetensors(SafetensorsReader& from, const std::vector<ModelUnit>& units, const std::string& path,
                        const ImportOptions& options = {});

}  // namespace ballast
