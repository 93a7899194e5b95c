// StoredState: the states of one committed step or checkpoint, read by name and range, whatever the ranks, chunks and
// tiers of the run that wrote them. Every chunk is checked before a byte of it is used.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "durable/manifest.h"

namespace ballast::engine {

class StoredState {
 public:
  // `paths`: as nvme.paths of the run that wrote it; manifests lie in the first. Throws IoError where files are
  // missing, CorruptionError where manifests are damaged or do not belong together.
  StoredState(std::vector<std::string> paths, std::uint64_t step);
  ~StoredState();

  std::uint64_t step() const { return manifests_.front().step; }
  const StoredLayout& layout() const { return layouts_.front(); }  // units and parameters are the same in all ranks'
  const Manifest& manifest() const { return manifests_.front(); }  // loss scale, the trainer's bytes, step counts
  std::uint32_t ranks() const { return static_cast<std::uint32_t>(layouts_.size()); }

  // Elements of a parameter, exact in fp32; moments where the spans are not empty (all three of one length). Throws
  // CorruptionError naming the file where the bytes are not what was written.
  void read(std::uint32_t unit, std::uint32_t parameter, std::uint64_t first, std::span<float> values,
            std::span<float> exp_avg, std::span<float> exp_avg_sq);
  void verify();  // reads and checks everything
  std::uint64_t stored_bytes() const;

 private:
  struct Piece {
    std::uint64_t first = 0, count = 0;  // of the parameter
    std::uint32_t rank = 0, chunk = 0;   // rank: index into layouts_
    std::uint64_t begin = 0;             // element within the chunk
  };
  const std::byte* chunk_bytes(std::uint32_t rank, std::uint32_t chunk);

  const std::vector<std::string> paths_;
  std::vector<StoredLayout> layouts_;
  std::vector<Manifest> manifests_;
  std::vector<std::vector<std::vector<Piece>>> pieces_;                 // by unit, parameter; in order
  std::map<std::pair<std::uint32_t, std::uint32_t>, int> descriptors_;  // by rank and path
  // The chunk that was read last.
  std::uint32_t held_rank_ = 0, held_chunk_ = UINT32_MAX;
  std::vector<std::byte> held_;
};

}  // namespace ballast::engine
