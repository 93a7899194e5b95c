// Layout: how a unit's parameters become a flat parameter, and how that is cut into chunks. Pure arithmetic.
//
// A flat parameter is sorted by (trainable first, dtype, counted in the norm first, group), then as registered; each
// parameter begins on a multiple of 128 elements (256 bytes in the narrowest dtype). Parameters of one (trainable,
// dtype, counted) form a section.
// With 8-bit moments it is a multiple of 256 elements, so that a block of moments holds elements of one parameter, from
// a multiple of 256 of its own: sections, shards and chunks begin on multiples of kSumBlock, so none of them cuts a
// block, and blocks are the same whatever the chunk size, the number of ranks, the placement and the neighbours. With
// several ranks a section consists of equal shards, one per rank in order; a shard is cut into chunks of about equal
// size whose borders are multiples of kernels::kSumBlock: sums of squares do not see them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/engine.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ballast::engine {

// In elements.
constexpr std::uint64_t parameter_alignment(MomentType moments) { return moments == MomentType::int8 ? 256 : 128; }

struct ParameterLayout {
  std::string name;
  std::vector<std::int64_t> shape;
  DataType dtype = DataType::bf16;
  int group = 0;
  bool trainable = true;
  bool counted = true;  // in the global norm; frozen ones are in none
  std::uint64_t elements = 0;
  std::uint64_t begin = 0;          // element within the unit
  std::uint64_t device_offset = 0;  // bytes within the unit's device copy
};

// A part of one parameter within one chunk.
struct Segment {
  std::uint32_t parameter = 0;  // within the unit
  std::uint64_t begin = 0;      // element within the chunk
  std::uint64_t count = 0;
  std::uint64_t parameter_first = 0;  // element within the parameter
};

struct ChunkLayout {
  std::uint32_t unit = 0;
  std::uint32_t shard = 0;  // the rank (of the unit's partition) whose shard it is part of
  DataType dtype = DataType::bf16;
  bool trainable = true;
  bool counted = true;              // in the global norm
  std::uint64_t begin = 0;          // element within the unit
  std::uint64_t elements = 0;       // with padding; a multiple of the granule
  std::uint64_t device_offset = 0;  // bytes within the unit's device copy
  std::uint32_t first_segment = 0, segment_count = 0;
  // Bytes of each state; the optimizer's states are master, exp_avg, exp_avg_sq in this order.
  std::uint64_t parameter_bytes = 0;
  std::uint64_t master_bytes = 0;
  std::uint64_t moment_bytes = 0;  // of one moment, with padding
  std::uint64_t optimizer_bytes() const { return master_bytes + 2 * moment_bytes; }
  std::uint64_t first_block = 0;  // index of its first sum-of-squares block over all chunks
};

// What a collective moves at once.
struct Section {
  DataType dtype = DataType::bf16;
  bool trainable = true;
  std::uint64_t begin = 0;           // element within the unit
  std::uint64_t shard_elements = 0;  // of each rank, with padding
  std::uint64_t device_offset = 0;   // bytes within the unit's device copy
};

struct Gap {
  std::uint64_t begin = 0, count = 0;  // elements of the unit that belong to no parameter
};

// How flat parameters are shared out, and which shards a rank stores.
struct Partition {
  std::uint32_t world_size = 1;
  std::uint32_t rank = 0;
  bool all_shards = false;  // this rank stores every shard (stage 0)
  bool stores(std::uint32_t shard) const { return all_shards || shard == rank; }
};

struct UnitLayout {
  std::string name;
  Partition partition;             // over the engine's ranks (or a shard group of them), or over its own communicator's
  std::uint32_t communicator = 0;  // 0: the engine's; otherwise a number from 1 on
  std::vector<ParameterLayout> parameters;  // as registered
  std::vector<Section> sections;
  std::uint32_t first_chunk = 0, chunk_count = 0;  // those that are stored here
  std::uint64_t device_bytes = 0;                  // parameters on the device, of all ranks
  std::uint64_t gradient_elements = 0;             // the trainable prefix, with padding
  std::vector<Gap> gradient_gaps;                  // within that prefix
};

struct Layout {
  std::vector<UnitLayout> units;
  std::vector<ChunkLayout> chunks;
  std::vector<Segment> segments;
  std::uint64_t blocks = 0;      // sum-of-squares blocks of all trainable chunks
  std::uint64_t parameters = 0;  // elements without padding, of all ranks
};

struct UnitSpec {
  std::string name;
  std::vector<ParameterSpec> parameters;
  std::uint32_t communicator = 0;           // as in UnitLayout
  std::optional<Partition> partition = {};  // over the unit's own communicator; nothing: the engine's
};

// chunk_elements: the size aimed at; granule: what chunks are multiples of (a multiple of kSumBlock). `partition` is
// that of units without one of their own, and says for all whether this rank stores every shard.
Layout make_layout(const std::vector<UnitSpec>& units, const Config::Precision& precision, std::uint64_t chunk_elements,
                   std::uint64_t granule, const Partition& partition = {});

// Elements of a shape; throws UsageError for a negative dimension or an overflow beyond 2^62.
std::uint64_t element_count(const std::vector<std::int64_t>& shape, const std::string& name);

// The part of `elements` that a rank holds: equal parts of ceil(elements / world_size), the last ones short or empty.
struct ShardRange {
  std::uint64_t begin = 0, count = 0;  // real elements
  std::uint64_t padded = 0;            // the same on every rank
};
ShardRange shard_range(std::uint64_t elements, std::uint32_t world_size, std::uint32_t rank, std::uint64_t granule = 1);

}  // namespace ballast::engine
