// Flat parameters and chunks.
// SPDX-License-Identifier: Apache-2.0
#include "layout.h"

#include <ballast/base/check.h>
#include <ballast/base/size.h>
#include <ballast/kernels/moments.h>
#include <ballast/kernels/reduce.h>

#include <algorithm>
#include <numeric>

namespace ballast::engine {

using base::ceil_div;
using base::round_up;

std::uint64_t element_count(const std::vector<std::int64_t>& shape, const std::string& name) {
  unsigned __int128 count = 1;
  for (std::int64_t dimension : shape) {
    if (dimension < 0)
      throw UsageError("parameter " + name + ": dimension " + std::to_string(dimension) + " is negative");
    count *= static_cast<std::uint64_t>(dimension);
    if (count >> 62) throw UsageError("parameter " + name + ": more than 2^62 elements");
  }
  return static_cast<std::uint64_t>(count);
}

ShardRange shard_range(std::uint64_t elements, std::uint32_t world_size, std::uint32_t rank, std::uint64_t granule) {
  BALLAST_CHECK(world_size > 0 && rank < world_size && granule > 0);
  ShardRange range;
  range.padded = round_up(ceil_div(elements, world_size), granule);
  range.begin = std::min(elements, range.padded * rank);
  range.count = std::min(range.padded, elements - range.begin);
  return range;
}

namespace {

static_assert(kernels::kSumBlock % kernels::kMomentBlock == 0);
static_assert(parameter_alignment(MomentType::int8) == kernels::kMomentBlock);
static_assert(moment_bytes(MomentType::int8, kernels::kMomentBlock) == kernels::kMomentBlockBytes);

constexpr std::uint64_t kChunksMax = std::uint64_t{1} << 24;

struct Builder {
  Layout& layout;
  const Config::Precision& precision;
  std::uint64_t chunk_elements;
  std::uint64_t granule;
  const Partition& partition;

  // The chunks of one shard, [begin, end) within the unit; all members are alike but for their shapes and groups.
  void add_chunks(std::uint32_t unit_index, std::uint32_t shard, std::uint64_t begin, std::uint64_t end,
                  std::uint64_t device_offset, const std::vector<std::uint32_t>& members) {
    UnitLayout& unit = layout.units[unit_index];
    const DataType dtype = unit.parameters[members.front()].dtype;
    const bool trainable = unit.parameters[members.front()].trainable;
    const std::uint64_t length = end - begin;
    const std::uint64_t pieces = ceil_div(length, chunk_elements);
    if (pieces + layout.chunks.size() > kChunksMax) {
      throw PlanError("unit " + layout.units[unit_index].name + ": more than " + std::to_string(kChunksMax) +
                      " chunks of " + std::to_string(chunk_elements) + " elements on one rank; use more ranks");
    }
    const std::uint64_t size = round_up(ceil_div(length, pieces), granule);
    std::size_t member = 0;
    for (std::uint64_t at = begin; at < end; at += size) {
      ChunkLayout chunk;
      chunk.unit = unit_index;
      chunk.shard = shard;
      chunk.dtype = dtype;
      chunk.trainable = trainable;
      chunk.counted = unit.parameters[members.front()].counted;
      chunk.begin = at;
      chunk.elements = std::min(size, end - at);
      chunk.device_offset = device_offset + (at - begin) * element_bytes(dtype);
      chunk.parameter_bytes = chunk.elements * element_bytes(dtype);
      if (trainable) {
        chunk.master_bytes = dtype == DataType::bf16   ? chunk.elements * 2
                             : dtype == DataType::fp16 ? chunk.elements * 4
                                                       : 0;
        // 8-bit ones end between borders of a drive's blocks: filled up, as two of them take a multiple of two
        // granules.
        chunk.moment_bytes = round_up(moment_bytes(precision.moments, chunk.elements), granule);
        chunk.first_block = layout.blocks;
        layout.blocks += chunk.elements / kernels::kSumBlock;
      } else if (dtype == DataType::bf16) {
        chunk.master_bytes = chunk.elements * 2;  // read() and export give the exact value of frozen parameters too
      }
      chunk.first_segment = static_cast<std::uint32_t>(layout.segments.size());
      const std::uint64_t chunk_end = at + chunk.elements;
      while (member < members.size()) {
        const ParameterLayout& parameter = unit.parameters[members[member]];
        if (parameter.begin >= chunk_end) break;
        if (parameter.begin + parameter.elements <= at) {  // in an earlier shard
          ++member;
          continue;
        }
        const std::uint64_t from = std::max(parameter.begin, at);
        const std::uint64_t to = std::min(parameter.begin + parameter.elements, chunk_end);
        if (from < to) layout.segments.push_back({members[member], from - at, to - from, from - parameter.begin});
        if (parameter.begin + parameter.elements > chunk_end) break;
        ++member;
      }
      chunk.segment_count = static_cast<std::uint32_t>(layout.segments.size()) - chunk.first_segment;
      layout.chunks.push_back(chunk);
      ++unit.chunk_count;
    }
  }

  void add_unit(const UnitSpec& spec) {
    const auto unit_index = static_cast<std::uint32_t>(layout.units.size());
    UnitLayout& unit = layout.units.emplace_back();
    unit.name = spec.name;
    unit.communicator = spec.communicator;
    unit.partition = spec.partition.value_or(partition);
    unit.partition.all_shards = partition.all_shards;
    unit.first_chunk = static_cast<std::uint32_t>(layout.chunks.size());
    for (const ParameterSpec& parameter : spec.parameters) {
      ParameterLayout p;
      p.name = parameter.name;
      p.shape = parameter.shape;
      p.dtype = parameter.options.dtype.value_or(precision.parameters);
      p.group = parameter.options.group;
      p.trainable = parameter.options.trainable;
      p.counted = !p.trainable || parameter.options.in_norm;
      p.elements = element_count(p.shape, spec.name + "/" + parameter.name);
      layout.parameters += p.elements;
      unit.parameters.push_back(std::move(p));
    }
    std::vector<std::uint32_t> order(unit.parameters.size());
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
      const ParameterLayout& x = unit.parameters[a];
      const ParameterLayout& y = unit.parameters[b];
      return std::tuple(!x.trainable, x.dtype, !x.counted, x.group) <
             std::tuple(!y.trainable, y.dtype, !y.counted, y.group);
    });
    std::uint64_t element = 0;
    std::uint64_t byte = 0;
    for (std::size_t i = 0; i < order.size();) {
      const DataType dtype = unit.parameters[order[i]].dtype;
      const bool trainable = unit.parameters[order[i]].trainable;
      const bool counted = unit.parameters[order[i]].counted;
      const std::uint64_t begin = element;
      std::uint64_t gap_begin = begin;
      std::vector<std::uint32_t> members;
      for (; i < order.size(); ++i) {
        ParameterLayout& p = unit.parameters[order[i]];
        if (p.dtype != dtype || p.trainable != trainable || p.counted != counted) break;
        element = round_up(element, parameter_alignment(precision.moments));
        if (trainable && element > gap_begin) unit.gradient_gaps.push_back({gap_begin, element - gap_begin});
        p.begin = element;
        p.device_offset = byte + (element - begin) * element_bytes(dtype);
        element += p.elements;
        gap_begin = element;
        members.push_back(order[i]);
      }
      // Every rank holds an equal part of the section.
      const std::uint64_t shard = shard_range(element - begin, unit.partition.world_size, 0, granule).padded;
      element = begin + shard * unit.partition.world_size;
      if (trainable) {
        if (element > gap_begin) unit.gradient_gaps.push_back({gap_begin, element - gap_begin});
        unit.gradient_elements = element;
      }
      if (element > begin) unit.sections.push_back({dtype, trainable, begin, shard, byte});
      for (std::uint32_t s = 0; s < unit.partition.world_size && element > begin; ++s) {
        if (!unit.partition.stores(s)) continue;
        add_chunks(unit_index, s, begin + s * shard, begin + (s + 1) * shard, byte + s * shard * element_bytes(dtype),
                   members);
      }
      byte += (element - begin) * element_bytes(dtype);
    }
    unit.device_bytes = byte;
  }
};

}  // namespace

Layout make_layout(const std::vector<UnitSpec>& units, const Config::Precision& precision, std::uint64_t chunk_elements,
                   std::uint64_t granule, const Partition& partition) {
  BALLAST_CHECK(granule % kernels::kSumBlock == 0 && chunk_elements % granule == 0);
  Layout layout;
  Builder builder{layout, precision, chunk_elements, granule, partition};
  for (const UnitSpec& unit : units) builder.add_unit(unit);
  return layout;
}

}  // namespace ballast::engine
