// Safetensors as a checkpoint: chunks of parameters alone, and a manifest of step 0.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/base/size.h>
#include <ballast/engine/safetensors.h>
#include <ballast/kernels/convert.h>
#include <ballast/kernels/reduce.h>
#include <ballast/offload/chunk_work.h>
#include <ballast/offload/cpu_pool.h>
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <optional>

#include "chunk_values.h"
#include "durable/checkpoints.h"
#include "durable/manifest.h"
#include "extent_buffer.h"
#include "json_value.h"
#include "layout.h"

namespace ballast {

using engine::ChunkLayout;

namespace {

constexpr std::uint64_t kChunkElements = std::uint64_t{1} << 20;
constexpr std::size_t kPieceElements = std::size_t{1} << 16;

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const std::int64_t dimension : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(dimension);
  return text + "]";
}

std::string list_of(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < std::min<std::size_t>(names.size(), 3); ++i) {
    text += (text.empty() ? "" : ", ") + json::printable(names[i]);
  }
  return text + (names.size() > 3 ? " and " + std::to_string(names.size() - 3) + " more" : "");
}

// The tensor of each parameter, by unit.
std::vector<std::vector<std::size_t>> match(const SafetensorsReader& from, const std::vector<ModelUnit>& units,
                                            const ImportOptions& options) {
  std::vector<std::vector<std::size_t>> chosen;
  std::vector<bool> used(from.tensors().size(), false);
  std::vector<std::string> missing, unused;
  for (const ModelUnit& unit : units) {
    std::vector<std::size_t>& of_unit = chosen.emplace_back();
    for (const ParameterSpec& parameter : unit.parameters) {
      const std::string name = options.name ? options.name(unit, parameter) : unit.name + "." + parameter.name;
      const auto found = from.find(name);
      if (!found) {
        missing.push_back(name);
        continue;
      }
      const SafetensorsTensor& tensor = from.tensors()[*found];
      const std::string what = tensor.file + ": tensor " + json::printable(name);
      if (used[*found]) throw ConfigError(what + " would be two parameters");
      if (tensor.shape != parameter.shape) {
        throw ConfigError(what + " is " + shape_text(tensor.shape) + ", and the parameter is " +
                          shape_text(parameter.shape));
      }
      if (!parameter_type(tensor)) {
        throw ConfigError(what + " is of " + tensor.dtype + "; parameters can be F32, F16 or BF16");
      }
      used[*found] = true;
      of_unit.push_back(*found);
    }
  }
  for (std::size_t i = 0; i < used.size(); ++i) {
    const SafetensorsTensor& tensor = from.tensors()[i];
    if (!used[i] && !(options.ignore && options.ignore(tensor))) unused.push_back(tensor.name);
  }
  if (missing.empty() && unused.empty()) return chosen;
  throw ConfigError(
      "the safetensors are of another model: " + (missing.empty() ? "" : "there is no tensor " + list_of(missing)) +
      (missing.empty() || unused.empty() ? "" : "; ") +
      (unused.empty() ? "" : "no parameter is made of " + list_of(unused)));
}

// Rounds to what the type holds, to nearest even. Nothing that is finite may become infinite: the offset of the first.
std::optional<std::size_t> round_to(DataType type, std::span<float> values) {
  std::vector<std::uint16_t> narrow(std::min(values.size(), kPieceElements));
  std::vector<float> rounded(narrow.size());
  for (std::size_t at = 0; type != DataType::fp32 && at < values.size(); at += narrow.size()) {
    const std::size_t count = std::min(narrow.size(), values.size() - at);
    if (type == DataType::bf16) {
      kernels::fp32_to_bf16(values.data() + at, narrow.data(), count);
      kernels::bf16_to_fp32(narrow.data(), rounded.data(), count);
    } else {
      kernels::fp32_to_fp16(values.data() + at, narrow.data(), count);
      kernels::fp16_to_fp32(narrow.data(), rounded.data(), count);
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (std::isfinite(values[at + i]) && !std::isfinite(rounded[i])) return at + i;
    }
    std::copy_n(rounded.data(), count, values.data() + at);
  }
  return std::nullopt;
}

// Chunk after chunk into one file.
class ChunkFileWriter {
 public:
  ChunkFileWriter(const std::string& folder, const engine::Layout& layout, std::array<std::uint8_t, 16> identity,
                  std::uint64_t most_bytes)
      : extent_(most_bytes) {
    io::ChunkStoreOptions options;
    options.paths = {folder};
    options.run_identity = identity;
    options.keep_on_close = true;
    for (const ChunkLayout& chunk : layout.chunks) {
      options.chunk_bytes.push_back(chunk.parameter_bytes + chunk.optimizer_bytes());
    }
    store_.emplace(std::move(options));
  }
  std::byte* extent() { return extent_.data(); }
  void write(std::uint32_t chunk, std::uint64_t bytes) {
    io::Transfer transfer;
    transfer.direction = io::Direction::write;
    transfer.chunk = chunk;
    transfer.data = extent_.data();
    transfer.bytes = bytes;
    std::array<io::Transfer*, 1> one = {&transfer};
    store_->submit(one);
    while (store_->poll(one, true) == 0) {
    }
    if (transfer.error_number != 0) {
      throw IoError("writing " + store_->describe(transfer) + " failed: " + std::strerror(transfer.error_number));
    }
  }
  io::ChunkStore& store() { return *store_; }

 private:
  engine::ExtentBuffer extent_;
  std::optional<io::ChunkStore> store_;
};

class Importer {
 public:
  Importer(SafetensorsReader& from, const std::vector<ModelUnit>& units, const ImportOptions& options)
      : from_(from), options_(options), tensors_(match(from, units, options)) {
    // Frozen: chunks without moments, which a run that goes on takes for zero.
    for (std::size_t u = 0; u < units.size(); ++u) {
      engine::UnitSpec& spec = specs_.emplace_back();
      spec.name = units[u].name;
      spec.parameters = units[u].parameters;
      for (std::size_t p = 0; p < spec.parameters.size(); ++p) {
        ParameterOptions& parameter = spec.parameters[p].options;
        parameter.dtype = options.dtype ? options.dtype : parameter_type(from.tensors()[tensors_[u][p]]);
        trainable_.push_back(parameter.trainable);
        parameter.trainable = false;
      }
    }
  }

  void write(const std::string& path) {
    engine::CheckpointFolder folder(path);
    const std::string place = engine::CheckpointFolder::unpublished(path);
    const std::uint64_t granule =
        std::max<std::uint64_t>(kernels::kSumBlock, io::ChunkStore::probe_alignment_bytes({place}) / 2);
    layout_ = engine::make_layout(specs_, {}, base::round_up(kChunkElements, granule), granule);
    std::uint64_t most = 0;
    for (const ChunkLayout& chunk : layout_.chunks) {
      most = std::max(most, chunk.parameter_bytes + chunk.optimizer_bytes());
    }
    engine::StoredLayout stored = stored_layout();
    engine::Manifest manifest;
    for (const engine::StoredLayout::Unit& unit : stored.units) {
      manifest.step_counts.emplace_back(unit.parameters.size(), 0);
    }
    {
      ChunkFileWriter writer(place, layout_, stored.run_identity, most);
      for (std::uint32_t c = 0; c < layout_.chunks.size(); ++c) {
        if (options_.check_interrupt) options_.check_interrupt();
        manifest.chunks.push_back(fill(layout_.chunks[c], writer.extent()));
        writer.write(c, layout_.chunks[c].parameter_bytes + layout_.chunks[c].optimizer_bytes());
        stored.chunks[c].offset_bytes = writer.store().offset_bytes(c);
        stored.chunks[c].slot_bytes = writer.store().slot_bytes(c);
      }
      writer.store().flush();
    }
    engine::ManifestLog(io::make_small_files(place), 0).publish(engine::encode_layout(stored), manifest);
    folder.publish();
  }

 private:
  engine::StoredLayout stored_layout() {
    engine::StoredLayout stored = engine::stored_parts(layout_);
    for (std::size_t done = 0; done < stored.run_identity.size();) {
      const ssize_t count = ::getrandom(stored.run_identity.data() + done, stored.run_identity.size() - done, 0);
      if (count < 0 && errno != EINTR) throw IoError(std::string("no random bytes: ") + std::strerror(errno));
      if (count > 0) done += static_cast<std::size_t>(count);
    }
    stored.fingerprint = engine::kNoSettings;
    std::size_t parameter = 0;
    for (engine::StoredLayout::Unit& unit : stored.units) {
      for (engine::ParameterLayout& each : unit.parameters) each.trainable = trainable_[parameter++];
    }
    return stored;
  }

  engine::StoredChunk fill(const ChunkLayout& chunk, std::byte* extent) {
    values_.assign(chunk.elements, 0.0F);
    for (std::uint32_t s = chunk.first_segment; s < chunk.first_segment + chunk.segment_count; ++s) {
      const engine::Segment& segment = layout_.segments[s];
      const std::size_t tensor = tensors_[chunk.unit][segment.parameter];
      const std::span<float> part = std::span(values_).subspan(segment.begin, segment.count);
      from_.read(tensor, static_cast<std::int64_t>(segment.parameter_first), part);
      const float* const data = part.data();
      if (const auto lost = options_.dtype ? round_to(*options_.dtype, part) : std::nullopt) {
        throw ConfigError("element " + std::to_string(segment.parameter_first + *lost) + " of tensor " +
                          json::printable(from_.tensors()[tensor].name) + ", " + std::to_string(data[*lost]) +
                          ", is beyond what " + std::string(to_string(*options_.dtype)) + " can hold");
      }
    }
    const std::uint64_t rest = chunk.optimizer_bytes();
    std::memset(extent, 0, chunk.parameter_bytes + rest);
    engine::to_states(chunk, values_.data(), extent);
    const auto pool = offload::make_inline_pool();
    return {0, offload::checksum(*pool, extent, chunk.parameter_bytes),
            offload::checksum(*pool, extent + chunk.parameter_bytes, rest)};
  }

  SafetensorsReader& from_;
  const ImportOptions& options_;
  const std::vector<std::vector<std::size_t>> tensors_;
  std::vector<engine::UnitSpec> specs_;
  std::vector<bool> trainable_;
  engine::Layout layout_;
  std::vector<float> values_;
};

}  // namespace

void import_safetensors(SafetensorsReader& from, const std::vector<ModelUnit>& units, const std::string& path,
                        const ImportOptions& options) {
  if (path.empty()) throw UsageError("import_safetensors without a path");
  Importer(from, units, options).write(path);
}

}  // namespace ballast
