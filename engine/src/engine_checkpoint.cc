// Checkpoints as the engine sees them: writing one, and loading states that another run has left, whatever its ranks
// and chunks.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "chunk_values.h"
#include "durable/checkpoints.h"
#include "engine_implementation.h"
#include "extent_buffer.h"

namespace ballast {

using engine::CheckpointFolder;
using engine::ChunkLayout;
using engine::Segment;

namespace {

// Writes chunk after chunk, the next being read while one is written.
class ChunkWriter {
 public:
  ChunkWriter(io::ChunkStore& store, std::uint64_t most_bytes)
      : store_(store), first_(most_bytes), second_(most_bytes) {}
  std::byte* next() {
    current_ ^= 1U;
    wait(current_);
    return buffer();
  }
  void write(std::uint32_t chunk, std::uint64_t bytes) {
    io::Transfer& transfer = transfers_[current_];
    transfer = {};
    transfer.direction = io::Direction::write;
    transfer.chunk = chunk;
    transfer.data = buffer();
    transfer.bytes = bytes;
    io::Transfer* const one = &transfer;
    busy_[current_] = true;
    store_.submit({&one, 1});
  }
  void finish() {
    wait(0);
    wait(1);
  }

 private:
  std::byte* buffer() { return current_ == 0 ? first_.data() : second_.data(); }
  void wait(unsigned which) {
    while (busy_[which]) {
      std::array<io::Transfer*, 2> finished{};
      const std::size_t count = store_.poll(finished, true);
      for (std::size_t i = 0; i < count; ++i) {
        busy_[finished[i] == &transfers_[1] ? 1 : 0] = false;
        if (finished[i]->error_number == 0) continue;
        throw IoError("writing " + store_.describe(*finished[i]) +
                      " failed: " + std::strerror(finished[i]->error_number));
      }
    }
  }

  io::ChunkStore& store_;
  engine::ExtentBuffer first_, second_;
  std::array<io::Transfer, 2> transfers_;
  std::array<bool, 2> busy_{};
  unsigned current_ = 0;
};

std::uint64_t states_bytes(const ChunkLayout& chunk) { return chunk.parameter_bytes + chunk.optimizer_bytes(); }

}  // namespace

void EngineImplementation::save_checkpoint(const std::string& path, std::size_t keep) {
  require_initialized();
  if (path.empty()) throw UsageError("save_checkpoint without a path");
  if (step_.active || pass_.active) throw UsageError("save_checkpoint within a step; it comes between two");
  if (!unit_communicators_.empty()) {
    throw UsageError(
        "save_checkpoint with units that have communicators of their own: no rank knows all units; commit "
        "durable steps instead, which each rank goes on from in place");
  }
  settle();
  // One copy of everything: of stage 0 the first rank's, else the first shard group's.
  const bool holds = plan_.partition.all_shards ? plan_.rank == 0 : plan_.rank < plan_.partition.world_size;
  std::optional<CheckpointFolder> folder;
  std::string failure;
  const auto attempt = [&](const auto& work) {
    try {
      work();
    } catch (const IoError& error) {
      failure = error.what();
    }
    if (agree_all_good(failure.empty())) return;
    throw IoError(failure.empty()
                      ? "the checkpoint " + path + " is not written, as another rank could not write its part"
                      : "the checkpoint " + path + " is not written: " + failure);
  };
  attempt([&] {
    if (plan_.rank == 0) folder.emplace(path);
  });
  attempt([&] {
    if (holds) write_states(CheckpointFolder::unpublished(path));
  });
  attempt([&] {
    if (plan_.rank != 0) return;
    folder->publish();
    folder->prune(keep);
  });
}

// This rank's part of a checkpoint.
void EngineImplementation::write_states(const std::string& folder) {
  engine::StoredLayout layout = stored_layout();
  layout.path_count = 1;
  io::ChunkStoreOptions options;
  options.paths = {folder};
  options.rank = plan_.rank;
  options.storage.block_bytes = config_.nvme.block_bytes;
  options.storage.queue_depth = config_.nvme.queue_depth;
  options.run_identity = layout.run_identity = executor_->run_identity();
  options.keep_on_close = true;
  std::uint64_t most = 0;
  for (const ChunkLayout& chunk : plan_.layout.chunks) {
    options.chunk_bytes.push_back(states_bytes(chunk));
    most = std::max(most, states_bytes(chunk));
  }
  engine::Manifest manifest;
  manifest.step = steps_updated_;
  manifest.loss_scale = loss_scaler_.state();
  manifest.user_bytes = last_user_bytes_;
  for (const UnitState& unit : units_) manifest.step_counts.push_back(unit.step_counts);
  {
    io::ChunkStore store(std::move(options));
    ChunkWriter writer(store, most);
    for (std::uint32_t c = 0; c < plan_.layout.chunks.size(); ++c) {
      const ChunkLayout& chunk = plan_.layout.chunks[c];
      std::byte* const extent = writer.next();
      executor_->load_chunk(c, extent);
      const auto [parameter, optimizer] = engine::Executor::checksums_of(chunk, extent);
      manifest.chunks.push_back({0, parameter, optimizer});
      writer.write(c, states_bytes(chunk));
      layout.chunks[c].offset_bytes = store.offset_bytes(c);
      layout.chunks[c].slot_bytes = store.slot_bytes(c);
    }
    writer.finish();
    store.flush();
  }
  engine::ManifestLog(io::make_small_files(folder), plan_.rank).publish(engine::encode_layout(layout), manifest);
}

// From the first of sources_ that is whole on every rank.
void EngineImplementation::load_states() {
  std::string failures;
  for (const auto& [step, paths] : std::exchange(sources_, {})) {
    std::string failure;
    std::optional<engine::StoredState> state;
    try {
      state.emplace(paths, step);
    } catch (const CorruptionError& error) {
      failure = error.what();
    } catch (const IoError& error) {
      failure = error.what();
    }
    if (agree_all_good(failure.empty())) {
      require_same_model(state->layout(), paths.front());
      try {
        load_state(*state);
      } catch (const CorruptionError& error) {
        failure = error.what();
      } catch (const IoError& error) {
        failure = error.what();
      }
      if (agree_all_good(failure.empty())) {
        finish_loading(*state, paths.front());
        return;
      }
    }
    failures +=
        (failures.empty() ? "" : "; ") + (failure.empty() ? paths.front() + " is not whole for another rank" : failure);
    if (environment_.log && !failure.empty()) environment_.log(LogLevel::warning, failure);
  }
  throw CorruptionError("there is nothing whole to go on from: " + failures);
}

void EngineImplementation::load_state(engine::StoredState& state) {
  std::uint64_t most = 0;
  for (const ChunkLayout& chunk : plan_.layout.chunks) most = std::max(most, states_bytes(chunk));
  engine::ExtentBuffer extent(most);
  std::vector<float> values, exp_avg, exp_avg_sq;
  for (std::uint32_t c = 0; c < plan_.layout.chunks.size(); ++c) {
    const ChunkLayout& chunk = plan_.layout.chunks[c];
    const std::uint64_t moments = chunk.moment_bytes > 0 ? chunk.elements : 0;
    values.assign(chunk.elements, 0.0F);
    exp_avg.assign(moments, 0.0F);
    exp_avg_sq.assign(moments, 0.0F);
    for (std::uint32_t s = chunk.first_segment; s < chunk.first_segment + chunk.segment_count; ++s) {
      const Segment& segment = plan_.layout.segments[s];
      const auto part = [&](std::vector<float>& all) {
        return all.empty() ? std::span<float>() : std::span(all).subspan(segment.begin, segment.count);
      };
      state.read(chunk.unit, segment.parameter, segment.parameter_first, part(values), part(exp_avg), part(exp_avg_sq));
    }
    std::memset(extent.data(), 0, states_bytes(chunk));
    engine::to_states(chunk, values.data(), extent.data());
    std::byte* moment = extent.data() + chunk.parameter_bytes + chunk.master_bytes;
    for (const std::vector<float>* each : {&exp_avg, &exp_avg_sq}) {
      if (moments > 0) engine::to_moment(config_.precision.moments, *each, moment);
      moment += chunk.moment_bytes;
    }
    executor_->save_chunk(c, extent.data());
  }
}

void EngineImplementation::finish_loading(const engine::StoredState& state, const std::string& path) {
  const engine::Manifest& manifest = state.manifest();
  for (std::size_t u = 0; u < units_.size(); ++u) units_[u].step_counts = manifest.step_counts[u];
  if (state.layout().fingerprint != engine::kNoSettings) loss_scaler_.restore(manifest.loss_scale);
  steps_updated_ = manifest.step;
  last_user_bytes_ = manifest.user_bytes;
  resumed_ = ResumedStep{manifest.step, manifest.user_bytes, path};
  initialized_ = true;
  if (!plan_.durable) return;
  {
    Lock lock(executor_->mutex());
    request_commit(last_user_bytes_);
    finish_commit(lock);
  }
  // What was moved aside is not needed any more.
  for (std::size_t i = 0; plan_.rank == 0 && i < config_.nvme.paths.size(); ++i) engine::remove_folder(moved_path(i));
}

}  // namespace ballast
