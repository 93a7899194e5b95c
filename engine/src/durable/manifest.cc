// Manifests as bytes, and as files.
// SPDX-License-Identifier: Apache-2.0
#include "durable/manifest.h"

#include <ballast/base/error.h>
#include <ballast/offload/chunk_work.h>
#include <ballast/offload/cpu_pool.h>

#include <algorithm>
#include <charconv>

#include "durable/byte_stream.h"

namespace ballast::engine {
namespace {

constexpr std::uint64_t kMagic = 0x4e4d54534c4c4142;  // "BALLSTMN"
constexpr std::uint32_t kFormatVersion = 1;
constexpr const char* kSuffix = ".manifest";

std::uint64_t checksum_of(std::span<const std::byte> bytes) {
  const auto pool = offload::make_inline_pool();
  return offload::checksum(*pool, bytes.data(), bytes.size());
}

DataType data_type(ByteReader& in) {
  const auto value = in.number<std::uint8_t>();
  if (value > static_cast<std::uint8_t>(DataType::fp32)) in.fail("an unknown dtype");
  return static_cast<DataType>(value);
}

// What reading it takes.
std::uint64_t least_master_bytes(const StoredLayout::Chunk& chunk) {
  if (chunk.dtype == DataType::bf16) return chunk.elements * 2;
  return chunk.dtype == DataType::fp16 && chunk.master_bytes > 0 ? chunk.elements * 4 : 0;
}

void decode_layout(ByteReader& in, StoredLayout& layout) {
  const std::span<const std::byte> identity = in.raw(layout.run_identity.size());
  std::memcpy(layout.run_identity.data(), identity.data(), identity.size());
  layout.world_size = in.number<std::uint32_t>();
  layout.rank = in.number<std::uint32_t>();
  layout.partition.world_size = in.number<std::uint32_t>();
  layout.partition.rank = in.number<std::uint32_t>();
  layout.partition.all_shards = in.number<std::uint8_t>() != 0;
  if (layout.world_size == 0 || layout.rank >= layout.world_size || layout.partition.world_size == 0 ||
      layout.partition.world_size > layout.world_size || layout.partition.rank >= layout.partition.world_size) {
    in.fail("impossible ranks");
  }
  layout.path_count = in.number<std::uint32_t>();
  const auto moments = in.number<std::uint8_t>();
  if (moments > static_cast<std::uint8_t>(MomentType::int8)) in.fail("an unknown type of moments");
  layout.moments = static_cast<MomentType>(moments);
  layout.fingerprint = in.text();
  layout.units.resize(in.count(16));
  for (StoredLayout::Unit& unit : layout.units) {
    unit.name = in.text();
    unit.parameters.resize(in.count(38));
    for (ParameterLayout& parameter : unit.parameters) {
      parameter.name = in.text();
      parameter.shape.resize(in.count(8));
      for (std::int64_t& dimension : parameter.shape) dimension = in.number<std::int64_t>();
      parameter.dtype = data_type(in);
      parameter.group = in.number<std::int32_t>();
      parameter.trainable = in.number<std::uint8_t>() != 0;
      parameter.elements = in.number<std::uint64_t>();
      try {
        if (element_count(parameter.shape, parameter.name) != parameter.elements) in.fail("a shape of another size");
      } catch (const UsageError&) {
        in.fail("an impossible shape");
      }
    }
  }
  layout.chunks.resize(in.count(62));
  for (StoredLayout::Chunk& chunk : layout.chunks) {
    chunk.unit = in.number<std::uint32_t>();
    if (chunk.unit >= layout.units.size()) in.fail("a chunk of no unit");
    const std::vector<ParameterLayout>& parameters = layout.units[chunk.unit].parameters;
    chunk.dtype = data_type(in);
    chunk.trainable = in.number<std::uint8_t>() != 0;
    chunk.elements = in.number<std::uint64_t>();
    chunk.parameter_bytes = in.number<std::uint64_t>();
    chunk.master_bytes = in.number<std::uint64_t>();
    chunk.moment_bytes = in.number<std::uint64_t>();
    chunk.offset_bytes = in.number<std::uint64_t>();
    chunk.slot_bytes = in.number<std::uint64_t>();
    constexpr std::uint64_t kMost = std::uint64_t{1} << 50;
    if (chunk.elements > kMost || chunk.parameter_bytes > kMost || chunk.master_bytes > kMost ||
        chunk.moment_bytes > kMost || chunk.offset_bytes > 64 * kMost || chunk.slot_bytes > 4 * kMost ||
        chunk.slot_bytes < chunk.stored_bytes() ||
        chunk.parameter_bytes < chunk.elements * element_bytes(chunk.dtype) ||
        chunk.master_bytes < least_master_bytes(chunk) ||
        (chunk.moment_bytes > 0 && chunk.moment_bytes < moment_bytes(layout.moments, chunk.elements))) {
      in.fail("impossible sizes of a chunk");
    }
    chunk.segments.resize(in.count(28));
    for (Segment& segment : chunk.segments) {
      segment.parameter = in.number<std::uint32_t>();
      segment.begin = in.number<std::uint64_t>();
      segment.count = in.number<std::uint64_t>();
      segment.parameter_first = in.number<std::uint64_t>();
      if (segment.parameter >= parameters.size() || segment.begin > chunk.elements ||
          segment.count > chunk.elements - segment.begin ||
          segment.parameter_first > parameters[segment.parameter].elements ||
          segment.count > parameters[segment.parameter].elements - segment.parameter_first) {
        in.fail("a segment outside its chunk or parameter");
      }
    }
  }
}

}  // namespace

StoredLayout stored_parts(const Layout& layout) {
  StoredLayout stored;
  for (const UnitLayout& unit : layout.units) stored.units.push_back({unit.name, unit.parameters});
  for (const ChunkLayout& chunk : layout.chunks) {
    const auto first = layout.segments.begin() + chunk.first_segment;
    StoredLayout::Chunk& out = stored.chunks.emplace_back();
    out.unit = chunk.unit;
    out.dtype = chunk.dtype;
    out.trainable = chunk.trainable;
    out.elements = chunk.elements;
    out.parameter_bytes = chunk.parameter_bytes;
    out.master_bytes = chunk.master_bytes;
    out.moment_bytes = chunk.moment_bytes;
    out.segments.assign(first, first + chunk.segment_count);
  }
  return stored;
}

std::vector<std::byte> encode_layout(const StoredLayout& layout) {
  ByteWriter out;
  out.raw(std::as_bytes(std::span(layout.run_identity)));
  out.number(layout.world_size);
  out.number(layout.rank);
  out.number(layout.partition.world_size);
  out.number(layout.partition.rank);
  out.number(static_cast<std::uint8_t>(layout.partition.all_shards));
  out.number(layout.path_count);
  out.number(static_cast<std::uint8_t>(layout.moments));
  out.text(layout.fingerprint);
  out.number(static_cast<std::uint64_t>(layout.units.size()));
  for (const StoredLayout::Unit& unit : layout.units) {
    out.text(unit.name);
    out.number(static_cast<std::uint64_t>(unit.parameters.size()));
    for (const ParameterLayout& parameter : unit.parameters) {
      out.text(parameter.name);
      out.number(static_cast<std::uint64_t>(parameter.shape.size()));
      for (const std::int64_t dimension : parameter.shape) out.number(dimension);
      out.number(static_cast<std::uint8_t>(parameter.dtype));
      out.number(static_cast<std::int32_t>(parameter.group));
      out.number(static_cast<std::uint8_t>(parameter.trainable));
      out.number(parameter.elements);
    }
  }
  out.number(static_cast<std::uint64_t>(layout.chunks.size()));
  for (const StoredLayout::Chunk& chunk : layout.chunks) {
    out.number(chunk.unit);
    out.number(static_cast<std::uint8_t>(chunk.dtype));
    out.number(static_cast<std::uint8_t>(chunk.trainable));
    out.number(chunk.elements);
    out.number(chunk.parameter_bytes);
    out.number(chunk.master_bytes);
    out.number(chunk.moment_bytes);
    out.number(chunk.offset_bytes);
    out.number(chunk.slot_bytes);
    out.number(static_cast<std::uint64_t>(chunk.segments.size()));
    for (const Segment& segment : chunk.segments) {
      out.number(segment.parameter);
      out.number(segment.begin);
      out.number(segment.count);
      out.number(segment.parameter_first);
    }
  }
  return out.take();
}

std::vector<std::byte> encode_manifest(std::span<const std::byte> layout, const Manifest& manifest) {
  ByteWriter out;
  out.number(kMagic);
  out.number(kFormatVersion);
  out.number(manifest.step);
  out.blob(layout);
  out.number(manifest.loss_scale.scale);
  out.number(manifest.loss_scale.good_steps);
  // At most 20 of the one and 1,000 of the other; manifests from before there was the other read the same.
  out.number(manifest.loss_scale.overflows_at_one | manifest.loss_scale.overflows_borne << 16);
  out.blob(manifest.user_bytes);
  for (const std::vector<std::uint64_t>& counts : manifest.step_counts) {
    for (const std::uint64_t count : counts) out.number(count);
  }
  for (const StoredChunk& chunk : manifest.chunks) {
    out.number(chunk.slot);
    out.number(chunk.parameter_checksum);
    out.number(chunk.optimizer_checksum);
  }
  out.number(checksum_of(out.bytes()));
  return out.take();
}

void decode_manifest(std::span<const std::byte> bytes, const std::string& name, StoredLayout* layout,
                     Manifest* manifest) {
  ByteReader head(bytes, name);
  if (head.number<std::uint64_t>() != kMagic) head.fail("it does not begin as a manifest");
  if (const auto version = head.number<std::uint32_t>(); version != kFormatVersion) {
    throw CorruptionError(name + " has format version " + std::to_string(version) + ", and this build reads version " +
                          std::to_string(kFormatVersion));
  }
  if (bytes.size() < 20 + sizeof(std::uint64_t)) head.fail("it ends too early");
  std::uint64_t stated = 0;
  std::memcpy(&stated, bytes.last(sizeof stated).data(), sizeof stated);
  bytes = bytes.first(bytes.size() - sizeof stated);
  if (checksum_of(bytes) != stated) head.fail("its checksum is wrong");
  ByteReader in(bytes.subspan(12), name);
  manifest->step = in.number<std::uint64_t>();
  ByteReader inner(in.raw(in.count(1)), name);
  decode_layout(inner, *layout);
  if (!inner.empty()) in.fail("its layout is followed by something");
  manifest->loss_scale.scale = in.number<double>();
  manifest->loss_scale.good_steps = in.number<std::uint32_t>();
  const auto overflows = in.number<std::uint32_t>();
  manifest->loss_scale.overflows_at_one = overflows & 0xFFFF;
  manifest->loss_scale.overflows_borne = overflows >> 16;
  manifest->user_bytes = in.blob();
  manifest->step_counts.clear();
  for (const StoredLayout::Unit& unit : layout->units) {
    std::vector<std::uint64_t>& counts = manifest->step_counts.emplace_back();
    for (std::size_t p = 0; p < unit.parameters.size(); ++p) counts.push_back(in.number<std::uint64_t>());
  }
  manifest->chunks.resize(layout->chunks.size());
  for (StoredChunk& chunk : manifest->chunks) {
    chunk.slot = in.number<std::uint8_t>();
    if (chunk.slot > 1) in.fail("a chunk in slot " + std::to_string(chunk.slot));
    chunk.parameter_checksum = in.number<std::uint64_t>();
    chunk.optimizer_checksum = in.number<std::uint64_t>();
  }
  if (!in.empty()) in.fail("something follows its end");
}

ManifestLog::ManifestLog(std::shared_ptr<io::SmallFiles> files, std::uint32_t rank)
    : files_(std::move(files)), prefix_("ballast-rank" + std::to_string(rank) + ".step-") {}

std::vector<std::uint32_t> ManifestLog::ranks_of(io::SmallFiles& files, std::uint64_t step) {
  std::vector<std::uint32_t> ranks;
  const std::string middle = ".step-" + std::to_string(step) + kSuffix;
  for (const std::string& name : files.list()) {
    const std::string_view head = "ballast-rank";
    if (!name.starts_with(head) || !name.ends_with(middle)) continue;
    std::uint32_t rank = 0;
    const char* const end = name.data() + name.size() - middle.size();
    const auto [at, error] = std::from_chars(name.data() + head.size(), end, rank);
    if (error == std::errc{} && at == end) ranks.push_back(rank);
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

std::vector<std::uint64_t> ManifestLog::steps_of(io::SmallFiles& files) {
  std::vector<std::uint64_t> steps;
  for (const std::string& name : files.list()) {
    const std::size_t at = name.find(".step-");
    if (!name.starts_with("ballast-rank") || !name.ends_with(kSuffix) || at == std::string::npos) continue;
    std::uint64_t step = 0;
    const char* const end = name.data() + name.size() - std::string_view(kSuffix).size();
    const auto [stop, error] = std::from_chars(name.data() + at + 6, end, step);
    if (error == std::errc{} && stop == end) steps.push_back(step);
  }
  std::sort(steps.rbegin(), steps.rend());
  steps.erase(std::unique(steps.begin(), steps.end()), steps.end());
  return steps;
}

std::string ManifestLog::name_of(std::uint64_t step) const { return prefix_ + std::to_string(step) + kSuffix; }

std::optional<std::uint64_t> ManifestLog::step_of(const std::string& name) const {
  if (!name.starts_with(prefix_) || !name.ends_with(kSuffix)) return std::nullopt;
  const std::size_t end = name.size() - std::string_view(kSuffix).size();
  if (end <= prefix_.size()) return std::nullopt;
  std::uint64_t step = 0;
  const auto [at, error] = std::from_chars(name.data() + prefix_.size(), name.data() + end, step);
  if (error != std::errc{} || at != name.data() + end) return std::nullopt;
  return step;
}

std::vector<std::uint64_t> ManifestLog::steps() {
  std::vector<std::uint64_t> found;
  for (const std::string& name : files_->list()) {
    if (const auto step = step_of(name)) found.push_back(*step);
  }
  std::sort(found.rbegin(), found.rend());
  return found;
}

void ManifestLog::load(std::uint64_t step, StoredLayout* layout, Manifest* manifest) {
  const std::string name = name_of(step);
  decode_manifest(files_->read(name), files_->path(name), layout, manifest);
  if (manifest->step != step) {
    throw CorruptionError(files_->path(name) + " says that it is of step " + std::to_string(manifest->step));
  }
}

void ManifestLog::publish(std::span<const std::byte> layout, const Manifest& manifest) {
  io::publish(*files_, name_of(manifest.step), encode_manifest(layout, manifest));
  std::vector<std::uint64_t> before;
  for (const std::string& name : files_->list()) {
    const auto step = step_of(name);
    if (step && *step < manifest.step) before.push_back(*step);
    if (!step && name.starts_with(prefix_) && name.ends_with(io::kUnpublishedSuffix)) files_->remove(name);
  }
  std::sort(before.rbegin(), before.rend());
  for (std::size_t i = 1; i < before.size(); ++i) files_->remove(name_of(before[i]));
}

void ManifestLog::remove_all() {
  // The newest first: what an interruption leaves is an older state or none, never one that is claimed to be whole and
  // is not.
  for (const std::uint64_t step : steps()) files_->remove(name_of(step));
  for (const std::string& name : files_->list()) {
    if (name.starts_with(prefix_) && name.ends_with(io::kUnpublishedSuffix)) files_->remove(name);
  }
  if (!files_->list().empty()) files_->flush_directory();
}

}  // namespace ballast::engine
