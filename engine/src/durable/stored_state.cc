// Reading what another run has written.
// SPDX-License-Identifier: Apache-2.0
#include "durable/stored_state.h"

#include <ballast/base/error.h>
#include <ballast/io/chunk_store.h>
#include <ballast/kernels/convert.h>
#include <ballast/offload/chunk_work.h>
#include <ballast/offload/cpu_pool.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "chunk_values.h"

namespace ballast::engine {

StoredState::StoredState(std::vector<std::string> paths, std::uint64_t step) : paths_(std::move(paths)) {
  const std::shared_ptr<io::SmallFiles> files = io::make_small_files(paths_.front());
  const std::vector<std::uint32_t> found = ManifestLog::ranks_of(*files, step);
  const std::string name = "step " + std::to_string(step) + " in " + paths_.front();
  if (found.empty()) throw IoError(name + " has no manifest");
  const auto load = [&](std::uint32_t rank) {
    if (!std::binary_search(found.begin(), found.end(), rank)) {
      throw CorruptionError(name + " is not whole: the manifest of rank " + std::to_string(rank) + " is missing (" +
                            ManifestLog(files, rank).path(step) + ")");
    }
    StoredLayout& layout = layouts_.emplace_back();
    ManifestLog(files, rank).load(step, &layout, &manifests_.emplace_back());
    const StoredLayout& first = layouts_.front();
    if (layout.rank != rank || layout.world_size != first.world_size || layout.path_count != first.path_count ||
        layout.partition.world_size != first.partition.world_size || layout.fingerprint != first.fingerprint ||
        layout.units.size() != first.units.size() || layout.run_identity != first.run_identity) {
      throw CorruptionError(name + " is not of one run: " + ManifestLog(files, rank).path(step) +
                            " is of another one than rank 0's");
    }
  };
  load(0);
  // One copy of everything: rank 0 alone has it, or the ranks of the first shard group have.
  const StoredLayout& first = layouts_.front();
  if (first.path_count != paths_.size()) {
    throw ConfigError(name + " is spread over " + std::to_string(first.path_count) + " paths; name those, in order");
  }
  if (found.back() >= first.world_size) {
    throw CorruptionError(name + " is not of one run: " + ManifestLog(files, found.back()).path(step) + " is of rank " +
                          std::to_string(found.back()) + ", and the run had " + std::to_string(first.world_size) +
                          " ranks; take away what does not belong there");
  }
  const std::uint32_t holders = first.partition.all_shards ? 1 : first.partition.world_size;
  for (std::uint32_t rank = 1; rank < holders; ++rank) load(rank);
  for (std::uint32_t u = 0; u < layouts_.front().units.size(); ++u) {
    pieces_.emplace_back(layouts_.front().units[u].parameters.size());
  }
  for (std::uint32_t r = 0; r < layouts_.size(); ++r) {
    for (std::uint32_t c = 0; c < layouts_[r].chunks.size(); ++c) {
      const StoredLayout::Chunk& chunk = layouts_[r].chunks[c];
      for (const Segment& segment : chunk.segments) {
        std::vector<std::vector<Piece>>& unit = pieces_[chunk.unit];
        if (segment.parameter >= unit.size()) throw CorruptionError(name + " is not of one run");
        unit[segment.parameter].push_back({segment.parameter_first, segment.count, r, c, segment.begin});
      }
    }
  }
  for (std::size_t u = 0; u < pieces_.size(); ++u) {
    for (std::size_t p = 0; p < pieces_[u].size(); ++p) {
      std::vector<Piece>& pieces = pieces_[u][p];
      std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.first < b.first; });
      std::uint64_t end = 0;
      for (const Piece& piece : pieces) {
        if (piece.first != end) break;
        end += piece.count;
      }
      const ParameterLayout& parameter = layouts_.front().units[u].parameters[p];
      if (end != parameter.elements) {
        throw CorruptionError(name + " is not whole: parameter " + parameter.name + " of unit " +
                              layouts_.front().units[u].name + " has a gap at element " + std::to_string(end));
      }
    }
  }
}

StoredState::~StoredState() {
  for (const auto& [key, descriptor] : descriptors_) ::close(descriptor);
}

const std::byte* StoredState::chunk_bytes(std::uint32_t rank, std::uint32_t chunk) {
  if (rank == held_rank_ && chunk == held_chunk_) return held_.data();
  held_chunk_ = UINT32_MAX;
  const StoredLayout& layout = layouts_[rank];
  const StoredLayout::Chunk& what = layout.chunks[chunk];
  const StoredChunk& where = manifests_[rank].chunks[chunk];
  const std::uint32_t path = chunk % layout.path_count;
  const std::string file = paths_[path] + "/" + io::ChunkStore::file_name(layout.rank);
  const auto [at, fresh] = descriptors_.try_emplace({rank, path}, -1);
  if (fresh) at->second = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY);
  if (at->second < 0) {
    const int error = errno;
    descriptors_.erase(at);
    throw IoError("chunk file " + file + " cannot be opened: " + std::strerror(error));
  }
  const std::uint64_t offset = what.offset_bytes + where.slot * what.slot_bytes;
  struct stat status;
  if (::fstat(at->second, &status) != 0) throw IoError("chunk file " + file + ": " + std::strerror(errno));
  const auto file_bytes = static_cast<std::uint64_t>(status.st_size);
  // Also where only what fills up its slot is missing.
  const std::uint64_t whole_bytes = std::max(what.stored_bytes(), what.slot_bytes);
  if (offset > file_bytes || whole_bytes > file_bytes - offset) {
    throw CorruptionError("chunk " + std::to_string(chunk) + " of rank " + std::to_string(layout.rank) + " (unit " +
                          layout.units[what.unit].name + ", step " + std::to_string(step()) + ") should lie in " +
                          file + " at " + std::to_string(offset) + ", " + std::to_string(whole_bytes) +
                          " bytes, and the file ends at " + std::to_string(file_bytes) + ": it is cut short");
  }
  held_.resize(what.stored_bytes());
  for (std::uint64_t done = 0; done < held_.size();) {
    const ssize_t count =
        ::pread(at->second, held_.data() + done, held_.size() - done, static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      throw IoError("chunk file " + file + " at " + std::to_string(offset + done) +
                    " cannot be read: " + (count == 0 ? "it ends there" : std::strerror(errno)));
    }
    done += static_cast<std::uint64_t>(count);
  }
  // Read once: the memory is better used for something else.
  static_cast<void>(
      ::posix_fadvise(at->second, static_cast<off_t>(offset), static_cast<off_t>(held_.size()), POSIX_FADV_DONTNEED));
  const auto pool = offload::make_inline_pool();
  if (offload::checksum(*pool, held_.data(), what.parameter_bytes) != where.parameter_checksum ||
      offload::checksum(*pool, held_.data() + what.parameter_bytes, what.stored_bytes() - what.parameter_bytes) !=
          where.optimizer_checksum) {
    throw CorruptionError("chunk " + std::to_string(chunk) + " of rank " + std::to_string(layout.rank) + " (unit " +
                          layout.units[what.unit].name + ", step " + std::to_string(step()) + ") in " + file + " at " +
                          std::to_string(offset) + " is not what was written there");
  }
  held_rank_ = rank;
  held_chunk_ = chunk;
  return held_.data();
}

void StoredState::read(std::uint32_t unit, std::uint32_t parameter, std::uint64_t first, std::span<float> values,
                       std::span<float> exp_avg, std::span<float> exp_avg_sq) {
  const std::uint64_t end = first + values.size();
  const std::vector<Piece>& pieces = pieces_[unit][parameter];
  auto piece = std::upper_bound(pieces.begin(), pieces.end(), first,
                                [](std::uint64_t at, const Piece& p) { return at < p.first + p.count; });
  for (; piece != pieces.end() && piece->first < end; ++piece) {
    const std::uint64_t from = std::max(first, piece->first);
    const std::uint64_t count = std::min(end, piece->first + piece->count) - from;
    if (count == 0) continue;
    const StoredLayout::Chunk& chunk = layouts_[piece->rank].chunks[piece->chunk];
    const std::byte* const bytes = chunk_bytes(piece->rank, piece->chunk);
    const std::uint64_t begin = piece->begin + (from - piece->first);
    float* const out = values.data() + (from - first);
    const auto* const narrow = reinterpret_cast<const std::uint16_t*>(bytes) + begin;
    const std::byte* const master = bytes + chunk.parameter_bytes;
    if (chunk.dtype == DataType::fp32) {
      std::memcpy(out, bytes + begin * 4, count * 4);
    } else if (chunk.dtype == DataType::bf16) {
      kernels::merge_fp32(narrow, reinterpret_cast<const std::uint16_t*>(master) + begin, out, count);
    } else if (chunk.master_bytes > 0) {
      std::memcpy(out, master + begin * 4, count * 4);
    } else {
      kernels::fp16_to_fp32(narrow, out, count);
    }
    const std::byte* moments = master + chunk.master_bytes;
    for (const kernels::Moment which : {kernels::Moment::exp_avg, kernels::Moment::exp_avg_sq}) {
      const std::span<float> moment = which == kernels::Moment::exp_avg ? exp_avg : exp_avg_sq;
      if (!moment.empty()) {
        float* const to = moment.data() + (from - first);
        if (chunk.moment_bytes == 0) {
          std::fill_n(to, count, 0.0F);
        } else {
          moment_values(layouts_.front().moments, which, moments, begin, {to, count});
        }
      }
      moments += chunk.moment_bytes;
    }
  }
}

std::uint64_t StoredState::stored_bytes() const {
  std::uint64_t sum = 0;
  for (const StoredLayout& layout : layouts_) {
    for (const StoredLayout::Chunk& chunk : layout.chunks) sum += chunk.stored_bytes();
  }
  return sum;
}

void StoredState::verify() {
  for (std::uint32_t rank = 0; rank < layouts_.size(); ++rank) {
    for (std::uint32_t chunk = 0; chunk < layouts_[rank].chunks.size(); ++chunk) chunk_bytes(rank, chunk);
  }
}

}  // namespace ballast::engine
