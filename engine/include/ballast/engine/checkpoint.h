// CheckpointReader: what a checkpoint or a committed run holds, by name, without an engine: to inspect, verify, export,
// or take parameters from.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/config.h>
#include <ballast/engine/engine.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ballast {

struct StoredParameter {
  std::string unit, name;
  std::vector<std::int64_t> shape;
  std::int64_t elements = 0;
  DataType dtype = DataType::bf16;
  int group = 0;
  bool trainable = true;
  std::uint64_t step_count = 0;
};

// The newest step of a folder that is a checkpoint itself, by the names of its files; nothing of any other folder.
// Throws IoError where it cannot be listed.
std::optional<std::uint64_t> checkpoint_step(const std::string& path);

// The `step-N` folders in a folder, newest first: N and the path. Those that are another program's do not count. Throws
// IoError where it cannot be listed.
std::vector<std::pair<std::uint64_t, std::string>> checkpoints_in(const std::string& folder);

// One thread at a time. Holds one chunk in memory; every chunk is checked before a byte of it is used. While it lives,
// no engine can open the run that it reads.
class CheckpointReader {
 public:
  // `paths`: a checkpoint, a folder of checkpoints (the newest), or the nvme.paths of a run with durable steps, in
  // their order (the newest step that is there for every rank). Throws IoError where there is none or a running engine
  // holds it, CorruptionError where it is damaged or not whole, ConfigError where paths are missing.
  explicit CheckpointReader(std::vector<std::string> paths);
  ~CheckpointReader();
  CheckpointReader(CheckpointReader&&) noexcept;

  const std::string& path() const;  // the folder that was found
  std::uint64_t step() const;       // optimizer steps taken
  int world_size() const;           // of the run that wrote it
  double loss_scale() const;
  const std::string& settings() const;  // JSON: what of the configuration changes the numbers; {} for an import
  std::size_t user_bytes() const;       // the trainer's own, how many
  const std::vector<StoredParameter>& parameters() const;  // in the order of units and parameters
  std::optional<std::size_t> find(std::string_view unit, std::string_view name) const;
  std::uint64_t bytes() const;  // of all states

  // Elements of parameters()[index], exact in fp32; the parameter as the device computes with it, in its dtype
  // (data: count elements, aligned to them); the moments. Throw UsageError beyond the end, CorruptionError, IoError.
  void read(std::size_t index, std::int64_t first_element, std::span<float> values);
  void read_published(std::size_t index, std::int64_t first_element, std::int64_t count, std::byte* data);
  void read_moments(std::size_t index, std::int64_t first_element, std::span<float> exp_avg,
                    std::span<float> exp_avg_sq);
  // Reads and checks every chunk. Throws CorruptionError naming the first that is damaged.
  void verify();

 private:
  struct Implementation;
  std::unique_ptr<Implementation> implementation_;
};

// A unit as the trainer registers it.
struct ModelUnit {
  std::string name;
  std::vector<ParameterSpec> parameters;
};

// To fine-tune: engine.initialize(parameters_of(reader, units)) takes the parameters, and nothing else, that a
// checkpoint of whatever model, settings and dtypes has under the same names of unit and parameter; each rank reads
// what it stores. `units`: the engine's, in their order. Parameters that the checkpoint does not have are from
// `others`; where that is empty, ConfigError naming them, as for another shape. `from` outlives the result.
Engine::Fill parameters_of(CheckpointReader& from, const std::vector<ModelUnit>& units, Engine::Fill others = {});

}  // namespace ballast
