// Checkpoints as the engine sees them: writing one, and loading states that another run has left, whatever its ranks
// and chunks.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <filesystem>
#include <optional>

#include "chunk_values.h"
#include "durable/checkpoints.h"
#include "durable/chunk_writer.h"
#include "engine_implementation.h"
#include "extent_buffer.h"

namespace ballast {

using engine::CheckpointFolder;
using engine::ChunkLayout;
using engine::Segment;

namespace {

std::uint64_t states_bytes(const ChunkLayout& chunk) { return chunk.parameter_bytes + chunk.optimizer_bytes(); }

}  // namespace

void EngineImplementation::require_between_steps(const char* what) const {
  require_initialized();
  if (step_.active || pass_.active) throw UsageError(std::string(what) + " within a step; it comes between two");
}

void EngineImplementation::save_checkpoint(const std::string& path, std::size_t keep) {
  require_between_steps("save_checkpoint");
  if (path.empty()) throw UsageError("save_checkpoint without a path");
  // The folder is replaced as a whole.
  const auto whole = [](const std::string& folder) {
    std::error_code error;
    const std::filesystem::path found = std::filesystem::weakly_canonical(std::filesystem::absolute(folder), error);
    return (found / "").lexically_normal().string();
  };
  for (const std::string& storage : config_.nvme.paths) {
    if (whole(storage).starts_with(whole(path))) {
      throw UsageError("save_checkpoint to " + path + ", where the run itself lies (nvme.paths: " + storage +
                       "); name a folder of its own");
    }
  }
  if (!unit_communicators_.empty()) {
    throw UsageError(
        "save_checkpoint with units that have communicators of their own: no rank knows all units; commit "
        "durable steps instead, which each rank goes on from in place");
  }
  if (committer_) {
    save_beside_training(path, keep);
  } else {
    save_now(path, keep);
  }
}

// One copy of everything: of stage 0 the first rank's, else the first shard group's.
bool EngineImplementation::holds_checkpoint_part() const {
  return plan_.partition.all_shards ? plan_.rank == 0 : plan_.rank < plan_.partition.world_size;
}

io::ChunkStoreOptions EngineImplementation::checkpoint_store(const std::string& folder) const {
  io::ChunkStoreOptions options;
  options.paths = {folder};
  options.rank = plan_.rank;
  options.storage.block_bytes = config_.nvme.block_bytes;
  options.storage.queue_depth = config_.nvme.queue_depth;
  options.run_identity = executor_->run_identity();
  options.keep_on_close = true;
  if (hooks_ != nullptr) options.storage_factory = hooks_->checkpoint_storage;
  for (const ChunkLayout& chunk : plan_.layout.chunks) options.chunk_bytes.push_back(states_bytes(chunk));
  return options;
}

// But for its chunks.
engine::Manifest EngineImplementation::manifest_of_now() const {
  engine::Manifest manifest;
  manifest.step = steps_updated_;
  manifest.loss_scale = loss_scaler_.state();
  manifest.user_bytes = last_user_bytes_;
  for (const UnitState& unit : units_) manifest.step_counts.push_back(unit.step_counts);
  return manifest;
}

void EngineImplementation::save_now(const std::string& path, std::size_t keep) {
  settle_updates();
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
    if (holds_checkpoint_part()) write_states(CheckpointFolder::unpublished(path));
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
  layout.run_identity = executor_->run_identity();
  engine::Manifest manifest = manifest_of_now();
  std::uint64_t most = 0;
  for (const ChunkLayout& chunk : plan_.layout.chunks) most = std::max(most, states_bytes(chunk));
  engine::ExtentBuffer first(most), second(most);
  {
    io::ChunkStore store(checkpoint_store(folder));
    engine::ChunkWriter writer(store, {first.data(), second.data()});
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

// --- while training goes on ------------------------------------------------------------------------------------------

void EngineImplementation::save_beside_training(const std::string& path, std::size_t keep) {
  finish_checkpoint();
  engine::CheckpointPart part;
  std::string failure;
  try {
    if (plan_.rank == 0) part.folder = std::make_unique<CheckpointFolder>(path);
  } catch (const IoError& error) {
    failure = error.what();
  }
  if (!agree_all_good(failure.empty())) {
    throw IoError("the checkpoint " + path + " is not written" +
                  (failure.empty() ? ", as its folder could not be made" : ": " + failure));
  }
  part.alone = !several_ranks();
  part.keep = keep;
  part.layout = stored_layout();
  part.layout.path_count = 1;
  part.layout.run_identity = executor_->run_identity();
  part.store = checkpoint_store(CheckpointFolder::unpublished(path));
  part.holds = holds_checkpoint_part();
  Lock lock(executor_->mutex());
  executor_->wait(lock, [&] { return commits_pending_ == 0; });
  part.manifest = manifest_of_now();
  // A step that would not be committed by itself is. With several ranks some may have committed it already: none asks.
  if (!committer_->pending() && committer_->committed_step() != steps_updated_) request_commit(last_user_bytes_);
  save_path_ = path;
  save_phase_ = SavePhase::copying;
  save_in_place_ = false;
  save_ = std::make_unique<engine::CheckpointSave>(*executor_, std::move(part));
  committer_->copy_to(save_.get());
  executor_->wake();
}

// Several ranks: what all of them have reached. With `wait`, to its end.
void EngineImplementation::agree_on_save(bool wait) {
  while (save_phase_ == SavePhase::copying || save_phase_ == SavePhase::publishing) {
    const auto done = [&] { return save_phase_ == SavePhase::copying ? save_->copied() : save_->published(); };
    std::array<double, 3> words{};
    {
      Lock lock(executor_->mutex());
      if (wait) executor_->wait(lock, [&] { return done() || save_->ended(); });
      words = {save_->failure() ? 1.0 : 0.0, done() ? 1.0 : 0.0, save_->put_in_place() ? 1.0 : 0.0};
    }
    sum_over_all(*save_communicator_, words);
    if (words[0] > 0) {
      save_phase_ = SavePhase::failed;
      save_in_place_ = words[2] > 0;
    } else if (words[1] == plan_.world_size && save_phase_ == SavePhase::copying) {
      save_phase_ = SavePhase::publishing;
      const Lock lock(executor_->mutex());
      save_->publish();
    } else if (words[1] == plan_.world_size) {
      save_phase_ = SavePhase::published;
    }
    if (!wait) return;
  }
}

// At the end of a step's decision, where all ranks come by.
void EngineImplementation::watch_save() {
  if (save_ && several_ranks()) agree_on_save(false);
}

void EngineImplementation::finish_checkpoint() {
  require_between_steps("finish_checkpoint");
  if (!save_) return;
  bool committed = save_phase_ != SavePhase::copying;
  if (!several_ranks()) {
    const Lock lock(executor_->mutex());
    committed = save_->begun();
  }
  if (!committed) settle_updates();
  std::exception_ptr failure;
  if (several_ranks()) agree_on_save(true);
  {
    Lock lock(executor_->mutex());
    if (!several_ranks()) {
      executor_->wait(lock, [&] { return save_->ended(); });
      save_phase_ = save_->failure() ? SavePhase::failed : SavePhase::published;
      save_in_place_ = save_->put_in_place();
    }
    failure = save_->failure();
    committer_->copy_to(nullptr);
  }
  const std::unique_ptr<engine::CheckpointSave> over = std::move(save_);
  if (save_phase_ == SavePhase::published) return;
  const std::string text = "the checkpoint " + save_path_ + (save_in_place_ ? " is whole, but" : " is not written");
  if (!failure) throw IoError(text + ", as another rank could not do its part");
  try {
    std::rethrow_exception(failure);
  } catch (const IoError& error) {
    throw IoError(text + ": " + error.what());
  } catch (const CorruptionError& error) {
    throw CorruptionError(text + ": " + error.what());
  }
}

// With the engine.
void EngineImplementation::end_save() noexcept {
  if (!save_) return;
  bool whole = !step_.active && !pass_.active && std::uncaught_exceptions() <= exceptions_before_;
  try {
    {
      const Lock lock(executor_->mutex());
      whole = whole && !executor_->failed(lock);
    }
    if (whole) finish_checkpoint();
  } catch (const std::exception& error) {
    if (environment_.log) environment_.log(LogLevel::error, error.what());
  }
  if (!save_) return;
  {
    const Lock lock(executor_->mutex());
    committer_->copy_to(nullptr);
  }
  save_.reset();
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
      const StoredPlaces there = places_in(state->layout(), paths.front());
      try {
        load_state(*state, there);
      } catch (const CorruptionError& error) {
        failure = error.what();
      } catch (const IoError& error) {
        failure = error.what();
      }
      if (agree_all_good(failure.empty())) {
        finish_loading(*state, there, paths.front());
        return;
      }
    }
    failures +=
        (failures.empty() ? "" : "; ") + (failure.empty() ? paths.front() + " is not whole for another rank" : failure);
    if (environment_.log && !failure.empty()) environment_.log(LogLevel::warning, failure);
  }
  throw CorruptionError("there is nothing whole to go on from: " + failures);
}

void EngineImplementation::load_state(engine::StoredState& state, const StoredPlaces& there) {
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
      const auto [unit, parameter] = there.places[chunk.unit][segment.parameter];
      state.read(unit, parameter, segment.parameter_first, part(values), part(exp_avg), part(exp_avg_sq));
    }
    std::memset(extent.data(), 0, states_bytes(chunk));
    engine::to_states(chunk, values.data(), extent.data());
    std::byte* moment = extent.data() + chunk.parameter_bytes + chunk.master_bytes;
    for (const kernels::Moment which : {kernels::Moment::exp_avg, kernels::Moment::exp_avg_sq}) {
      const std::vector<float>& values_of = which == kernels::Moment::exp_avg ? exp_avg : exp_avg_sq;
      if (moments > 0) engine::to_moment(config_.precision.moments, which, values_of, moment);
      moment += chunk.moment_bytes;
    }
    executor_->save_chunk(c, extent.data());
  }
}

void EngineImplementation::finish_loading(const engine::StoredState& state, const StoredPlaces& there,
                                          const std::string& path) {
  const engine::Manifest& manifest = state.manifest();
  for (std::size_t u = 0; u < units_.size(); ++u) {
    for (std::size_t p = 0; p < there.places[u].size(); ++p) {
      const auto [unit, parameter] = there.places[u][p];
      // What is frozen keeps no moments, and its count would mean nothing beside new ones.
      const bool kept = plan_.layout.units[u].parameters[p].trainable;
      units_[u].step_counts[p] = kept ? manifest.step_counts[unit][parameter] : 0;
    }
  }
  if (!there.note.empty() && environment_.log) environment_.log(LogLevel::warning, path + ": " + there.note);
  if (state.layout().fingerprint != engine::kNoSettings) loss_scaler_.restore(manifest.loss_scale);
  steps_updated_ = manifest.step;
  executor_->note_steps(steps_updated_);
  last_user_bytes_ = manifest.user_bytes;
  resumed_ = ResumedStep{manifest.step, manifest.user_bytes, path};
  initialized_ = true;
  if (!plan_.durable) return;
  {
    Lock lock(executor_->mutex());
    request_commit(last_user_bytes_);
    finish_commit(lock);
  }
  forget_moved_run();
}

}  // namespace ballast
