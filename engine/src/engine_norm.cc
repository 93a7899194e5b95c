// The end of backward: the global norm and what all ranks agree on with it. Sums of squares are added in the order of
// shards, units and blocks, then of ranks; every rank adds the same numbers in the same order.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/kernels/reduce.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "engine_implementation.h"
#include "extent_buffer.h"

namespace ballast {

using engine::ChunkLayout;
using engine::Partition;
using engine::Segment;
using engine::UnitLayout;

GradientNorm EngineImplementation::finish_backward(const AddOthers& add_others) {
  if (!step_.active) throw UsageError("no step is running");
  if (pass_.active) throw UsageError("finish_backward while a pass is open; end it first");
  if (step_.finished_backward) return step_.norm;
  if (step_.covered != step_.options.micro_batches) {
    throw UsageError("the step declared " + std::to_string(step_.options.micro_batches) +
                     " micro-batches and its passes covered " + std::to_string(step_.covered));
  }
  // A failure leaves this rank behind: the others hear of it.
  const auto together = [&](const auto& work) {
    try {
      return work();
    } catch (...) {
      if (several_ranks()) executor_->fail(std::current_exception());
      throw;
    }
  };
  const bool absent = several_ranks() && together([&] { return agree_on_backward(static_cast<bool>(add_others)); });
  for (const auto& stream : streams_) stream->synchronize();
  Lock lock(executor_->mutex());
  executor_->wait(lock, [&] { return commits_pending_ == 0 && !executor_->scheduler().gradients_outstanding(); });
  for (std::size_t u = 0; u < units_.size(); ++u) {
    if (!units_[u].partial_open) continue;
    throw UsageError("unit " + plan_.layout.units[u].name + " has partial gradients whose commit is missing");
  }
  sum_locally();
  lock.unlock();
  GradientNorm norm;
  together([&] {
    if (absent) agree_on_presence();
    norm = global_norm(add_others);
    if (norm.finite) return;
    norm.non_finite_parameter = first_non_finite();
    if (several_ranks()) agree_on_name(norm.non_finite_parameter);
  });
  if (norm.finite && config_.optimizer.clip_global_norm && norm.value > *config_.optimizer.clip_global_norm)
    norm.clip_factor = *config_.optimizer.clip_global_norm / norm.value;
  step_.norm = norm;
  step_.finished_backward = true;
  return norm;
}

GradientNorm EngineImplementation::global_norm(const AddOthers& add_others) {
  if (several_ranks() && (config_.zero_stage > 0 || norm_parts_.size() > 1)) {
    communicator_->all_gather(std::as_bytes(std::span(local_sums_)), std::as_writable_bytes(std::span(all_sums_)));
  } else {
    std::copy(local_sums_.begin(), local_sums_.end(),
              all_sums_.begin() + static_cast<std::ptrdiff_t>(plan_.rank * local_sums_.size()));
  }
  double sum = 0;
  GradientTotal total;
  for (std::size_t part = 0; part < norm_parts_.size(); ++part) {
    const double squares = sum_over_ranks(part);
    total.finite = total.finite && std::isfinite(squares);
    // Sums over fewer ranks count as means over all.
    const double ratio = static_cast<double>(plan_.world_size) / norm_parts_[part].divisor;
    if (norm_parts_[part].counted) sum += squares * (ratio * ratio);
  }
  GradientNorm norm;
  norm.value = std::sqrt(sum) / gradient_divisor(plan_.world_size);
  if (add_others) {
    const double before = total.norm_squared = norm.value * norm.value;
    add_others(total);
    if (total.norm_squared < 0) {
      throw UsageError("finish_backward was told a squared norm of " + std::to_string(total.norm_squared) +
                       " with what other engines have; add theirs to what is there");
    }
    agree_on_total(total);
    if (total.norm_squared != before) norm.value = std::sqrt(total.norm_squared);
  }
  norm.finite = total.finite && std::isfinite(norm.value);
  if (!norm.finite && std::isfinite(norm.value)) norm.value = std::numeric_limits<double>::quiet_NaN();
  return norm;
}

// What goes into the norm alike; the same parts on all ranks, as their chunks are.
void EngineImplementation::sort_norm_parts() {
  const engine::Layout& layout = plan_.layout;
  norm_parts_ = {{0, static_cast<double>(plan_.world_size), true, plan_.partition}};
  chunk_parts_.assign(layout.chunks.size(), 0);
  for (std::size_t c = 0; c < layout.chunks.size(); ++c) {
    const ChunkLayout& chunk = layout.chunks[c];
    if (!chunk.trainable) continue;
    const UnitLayout& unit = layout.units[chunk.unit];
    const double divisor = rank_divisor(chunk.unit);
    const auto found = std::find_if(norm_parts_.begin(), norm_parts_.end(), [&](const NormPart& part) {
      return part.communicator == unit.communicator && part.divisor == divisor && part.counted == chunk.counted;
    });
    chunk_parts_[c] = static_cast<std::uint32_t>(found - norm_parts_.begin());
    if (found == norm_parts_.end()) norm_parts_.push_back({unit.communicator, divisor, chunk.counted, unit.partition});
  }
  local_sums_.assign(norm_parts_.size(), 0);
  all_sums_.assign(norm_parts_.size() * plan_.world_size, 0);
}

void EngineImplementation::sum_locally() {
  for (std::size_t part = 0; part < norm_parts_.size(); ++part) {
    const Partition& partition = norm_parts_[part].partition;
    double sum = 0;
    for (std::uint32_t shard = 0; shard < partition.world_size; ++shard) {
      if (!partition.stores(shard)) continue;
      double shard_sum = 0;
      for (std::uint32_t c = 0; c < chunk_contributed_.size(); ++c) {
        if (!chunk_contributed_[c] || chunk_parts_[c] != part || plan_.layout.chunks[c].shard != shard) continue;
        for (double block : executor_->block_sums(c)) shard_sum += block;
      }
      sum += shard_sum;
    }
    local_sums_[part] = sum;
  }
}

// Each shard once: those of one shard group, as the groups hold copies; those of every unit communicator at this place.
double EngineImplementation::sum_over_ranks(std::size_t part) const {
  const NormPart& p = norm_parts_[part];
  const auto sum_of = [&](std::uint32_t rank) { return all_sums_[rank * norm_parts_.size() + part]; };
  double sum = 0;
  if (p.communicator == 0) {
    if (p.partition.all_shards) return sum_of(plan_.rank);
    const std::uint32_t first = plan_.rank - p.partition.rank;
    for (std::uint32_t i = 0; i < p.partition.world_size; ++i) sum += sum_of(first + i);
    return sum;
  }
  for (const std::vector<std::uint32_t>& group : unit_communicators_[p.communicator - 1].groups) {
    double group_sum = 0;
    for (std::uint32_t rank : group) {
      group_sum += sum_of(rank);
      if (p.partition.all_shards) break;
    }
    sum += group_sum;
  }
  return sum;
}

// A step is skipped by all ranks or by none, and clipped by one factor.
void EngineImplementation::agree_on_total(GradientTotal& total) {
  total.finite = total.finite && std::isfinite(total.norm_squared);
  if (!several_ranks()) return;
  const double mine[2] = {total.norm_squared, total.finite ? 1.0 : 0.0};
  std::vector<double> all(2 * std::size_t{plan_.world_size});
  communicator_->all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  for (std::size_t i = 1; i < all.size(); i += 2) total.finite = total.finite && all[i] != 0;
  if (!total.finite) return;
  const double first = all[0];
  for (std::size_t rank = 1; rank < plan_.world_size; ++rank) {
    const double its = all[2 * rank];
    if (std::abs(its - first) <= 1e-6 * std::max(its, first)) continue;
    throw UsageError("finish_backward was told a squared norm of " + std::to_string(its) + " on rank " +
                     std::to_string(rank) + " and " + std::to_string(first) +
                     " on rank 0; every rank of an engine comes to the same total");
  }
  total.norm_squared = first;
}

// What the sum of a unit's gradients over ranks is divided by.
double EngineImplementation::rank_divisor(std::uint32_t unit) const {
  const UnitLayout& layout = plan_.layout.units[unit];
  return divisors_[unit].value_or(layout.communicator == 0 ? plan_.world_size : layout.partition.world_size);
}

// ... and over micro-batches too.
double EngineImplementation::gradient_divisor(double ranks) const {
  return static_cast<double>(step_.options.micro_batches) * ranks * loss_scaler_.scale();
}

std::string EngineImplementation::first_non_finite() const {
  for (std::uint32_t c = 0; c < chunk_contributed_.size(); ++c) {
    if (!chunk_contributed_[c]) continue;
    const std::span<const double> sums = executor_->block_sums(c);
    for (std::size_t b = 0; b < sums.size(); ++b) {
      if (std::isfinite(sums[b])) continue;
      const ChunkLayout& chunk = plan_.layout.chunks[c];
      const UnitLayout& unit = plan_.layout.units[chunk.unit];
      const std::uint64_t begin = b * kernels::kSumBlock;
      const std::uint64_t end = begin + kernels::kSumBlock;
      const std::byte* store = executor_->gradient_store(c);
      std::vector<std::byte> fetched;
      std::optional<engine::ExtentBuffer> read;
      if (const std::uint64_t bytes = plan_.placement[c].gradient_extent_bytes; bytes > 0) {
        executor_->load_gradient(c, read.emplace(bytes).data());
        store = read->data();
      }
      if (store != nullptr && !device_->host_addressable() && plan_.placement[c].gradients == Tier::device) {
        fetched.resize(chunk.elements * element_bytes(config_.precision.gradients));
        executor_->copy_from_device(fetched.data(), store, fetched.size());
        store = fetched.data();
      }
      for (std::uint32_t s = chunk.first_segment; s < chunk.first_segment + chunk.segment_count; ++s) {
        const Segment& segment = plan_.layout.segments[s];
        const std::uint64_t from = std::max(begin, segment.begin);
        const std::uint64_t to = std::min(end, segment.begin + segment.count);
        if (from >= to) continue;
        const bool finite =
            store == nullptr ? false
            : config_.precision.gradients == DataType::fp32
                ? kernels::all_finite_fp32(reinterpret_cast<const float*>(store) + from, to - from)
                : kernels::all_finite_bf16(reinterpret_cast<const std::uint16_t*>(store) + from, to - from);
        if (!finite) return unit.name + "/" + unit.parameters[segment.parameter].name;
      }
    }
  }
  return "";
}

}  // namespace ballast
