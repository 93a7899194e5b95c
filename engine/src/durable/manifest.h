// Manifest: what one rank committed in one step, whole: which slot of each chunk is current, with checksums; what the
// chunks hold, by name; step counts, loss scale and the trainer's own bytes. A small file beside the chunks.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/config.h>
#include <ballast/io/small_files.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "layout.h"
#include "loss_scaler.h"

namespace ballast::engine {

// The same in every step of a run: what the bytes of the chunks mean.
struct StoredLayout {
  std::array<std::uint8_t, 16> run_identity{};
  std::uint32_t world_size = 1, rank = 0;
  Partition partition;
  std::uint32_t path_count = 1;
  MomentType moments = MomentType::fp32;
  std::string fingerprint;  // JSON: what of the configuration changes the numbers
  struct Unit {
    std::string name;
    std::vector<ParameterLayout> parameters;
  };
  struct Chunk {
    std::uint32_t unit = 0;
    DataType dtype = DataType::bf16;
    bool trainable = true;
    std::uint64_t elements = 0;
    std::uint64_t parameter_bytes = 0, master_bytes = 0, moment_bytes = 0;
    // In the chunk file of path (index of the chunk) % path_count: slot 0, and from one slot to the next.
    std::uint64_t offset_bytes = 0, slot_bytes = 0;
    std::vector<Segment> segments;
    std::uint64_t stored_bytes() const { return parameter_bytes + master_bytes + 2 * moment_bytes; }
  };
  std::vector<Unit> units;
  std::vector<Chunk> chunks;
};

// The fingerprint of parameters that come from elsewhere: they fit every configuration.
constexpr const char* kNoSettings = "{}";

struct StoredChunk {
  std::uint8_t slot = 0;
  std::uint64_t parameter_checksum = 0, optimizer_checksum = 0;
};

struct Manifest {
  std::uint64_t step = 0;  // optimizer steps taken, of the whole run
  LossScaler::State loss_scale;
  std::vector<std::byte> user_bytes;                    // the trainer's
  std::vector<std::vector<std::uint64_t>> step_counts;  // by unit and parameter
  std::vector<StoredChunk> chunks;
};

// The units and chunks of a layout, as they are stored; the rest is the caller's.
StoredLayout stored_parts(const Layout& layout);

// The layout's bytes never change within a run and are made once.
std::vector<std::byte> encode_layout(const StoredLayout& layout);
std::vector<std::byte> encode_manifest(std::span<const std::byte> layout, const Manifest& manifest);
// Throws CorruptionError, naming `name`.
void decode_manifest(std::span<const std::byte> bytes, const std::string& name, StoredLayout* layout,
                     Manifest* manifest);

// The manifests of one rank in a directory. One thread at a time.
class ManifestLog {
 public:
  ManifestLog(std::shared_ptr<io::SmallFiles> files, std::uint32_t rank);

  // Steps that have a file, newest first; whole or not.
  std::vector<std::uint64_t> steps();
  // Throws CorruptionError or IoError.
  void load(std::uint64_t step, StoredLayout* layout, Manifest* manifest);
  // Whole and durable when this returns. Leaves the one before it, removes older ones and what an interrupted call has
  // left.
  void publish(std::span<const std::byte> layout, const Manifest& manifest);
  void remove_all();
  std::string path(std::uint64_t step) const { return files_->path(name_of(step)); }
  // Of all ranks whose manifests lie there: the ranks that have one of that step, in order; the steps, newest first.
  static std::vector<std::uint32_t> ranks_of(io::SmallFiles& files, std::uint64_t step);
  static std::vector<std::uint64_t> steps_of(io::SmallFiles& files);

 private:
  std::string name_of(std::uint64_t step) const;
  std::optional<std::uint64_t> step_of(const std::string& name) const;

  std::shared_ptr<io::SmallFiles> files_;
  std::string prefix_;
};

}  // namespace ballast::engine
