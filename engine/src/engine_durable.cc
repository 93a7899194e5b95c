// Durable steps as the engine sees them: what a directory holds from before, when a step is committed, and that the
// next one waits for it.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <sstream>

#include "durable/checkpoints.h"
#include "engine_implementation.h"
#include "extent_buffer.h"

namespace ballast {

using engine::StoredLayout;

namespace {

// What of a configuration changes the numbers.
std::string fingerprint(const Config& config) {
  const auto all = nlohmann::ordered_json::parse(config.to_json());
  nlohmann::ordered_json kept;
  for (const char* section : {"precision", "optimizer", "loss_scale"}) kept[section] = all.at(section);
  kept["optimizer"].erase("timing");
  return kept.dump();
}

// "optimizer.epsilon (1e-08 there, 1e-06 here)" for each key that differs.
std::string differing_keys(const std::string& there, const std::string& here) {
  const auto flat = [](const std::string& text) { return nlohmann::json::parse(text).flatten(); };
  const nlohmann::json a = flat(there), b = flat(here);
  std::string text;
  const auto add = [&](const std::string& pointer, const std::string& was, const std::string& is) {
    std::string key = pointer.substr(1);
    std::replace(key.begin(), key.end(), '/', '.');
    text += (text.empty() ? "" : ", ") + key + " (" + was + " there, " + is + " here)";
  };
  for (const auto& [key, value] : a.items()) {
    if (!b.contains(key)) add(key, value.dump(), "nothing");
    if (b.contains(key) && b.at(key) != value) add(key, value.dump(), b.at(key).dump());
  }
  for (const auto& [key, value] : b.items()) {
    if (!a.contains(key)) add(key, "nothing", value.dump());
  }
  return text;
}

std::string describe(const engine::ParameterLayout& parameter) {
  std::string text = "[";
  for (const std::int64_t dimension : parameter.shape) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(dimension);
  }
  return text + "] " + std::string(to_string(parameter.dtype)) + ", group " + std::to_string(parameter.group) +
         (parameter.trainable ? "" : ", frozen");
}

std::string describe_shape(const engine::ParameterLayout& parameter) {
  const std::string all = describe(parameter);
  return all.substr(0, all.find(']') + 1);
}

// The first difference; empty where there is none. Parameters that were imported are for every dtype and group.
std::string differing_model(const StoredLayout& there, const StoredLayout& here) {
  const bool imported = there.fingerprint == engine::kNoSettings;
  if (there.units.size() != here.units.size()) {
    return std::to_string(there.units.size()) + " units there, " + std::to_string(here.units.size()) + " here";
  }
  for (std::size_t u = 0; u < here.units.size(); ++u) {
    const StoredLayout::Unit &a = there.units[u], &b = here.units[u];
    if (a.name != b.name) return "unit " + a.name + " there, " + b.name + " here";
    if (a.parameters.size() != b.parameters.size()) {
      return "unit " + a.name + " has " + std::to_string(a.parameters.size()) + " parameters there, " +
             std::to_string(b.parameters.size()) + " here";
    }
    for (std::size_t p = 0; p < a.parameters.size(); ++p) {
      const auto text = [&](const engine::ParameterLayout& parameter) {
        return parameter.name + " " + (imported ? describe_shape(parameter) : describe(parameter));
      };
      const std::string was = text(a.parameters[p]), is = text(b.parameters[p]);
      if (was != is) return "in unit " + a.name + ": " + was + " there, " + is + " here";
    }
  }
  return "";
}

bool same_chunks(const StoredLayout& a, const StoredLayout& b) {
  const auto same = [](const StoredLayout::Chunk& x, const StoredLayout::Chunk& y) {
    const auto same_segment = [](const engine::Segment& s, const engine::Segment& t) {
      return s.parameter == t.parameter && s.begin == t.begin && s.count == t.count &&
             s.parameter_first == t.parameter_first;
    };
    return x.unit == y.unit && x.dtype == y.dtype && x.trainable == y.trainable && x.elements == y.elements &&
           x.parameter_bytes == y.parameter_bytes && x.master_bytes == y.master_bytes &&
           x.moment_bytes == y.moment_bytes &&
           std::equal(x.segments.begin(), x.segments.end(), y.segments.begin(), y.segments.end(), same_segment);
  };
  return std::equal(a.chunks.begin(), a.chunks.end(), b.chunks.begin(), b.chunks.end(), same);
}

}  // namespace

engine::ManifestLog EngineImplementation::manifest_log() const {
  std::shared_ptr<io::SmallFiles> files = hooks_ != nullptr ? hooks_->small_files : nullptr;
  if (files == nullptr) files = io::make_small_files(config_.nvme.paths.front());
  return {std::move(files), plan_.rank};
}

StoredLayout EngineImplementation::stored_layout() const {
  StoredLayout layout = engine::stored_parts(plan_.layout);
  layout.world_size = plan_.world_size;
  layout.rank = plan_.rank;
  layout.partition = plan_.partition;
  layout.path_count = static_cast<std::uint32_t>(config_.nvme.paths.size());
  layout.moments = config_.precision.moments;
  layout.fingerprint = fingerprint(config_);
  return layout;
}

void EngineImplementation::require_same_model(const StoredLayout& there, const std::string& where) const {
  const StoredLayout here = stored_layout();
  if (const std::string model = differing_model(there, here); !model.empty()) {
    throw ConfigError("the run in " + where + " is of another model: " + model);
  }
  if (there.fingerprint == engine::kNoSettings) return;
  if (const std::string keys = differing_keys(there.fingerprint, here.fingerprint); !keys.empty()) {
    throw ConfigError("the run in " + where + " was made with other settings: " + keys);
  }
}

// The very same chunks at the same places.
bool EngineImplementation::same_place(const StoredLayout& there) const {
  const StoredLayout here = stored_layout();
  return there.world_size == here.world_size && there.rank == here.rank &&
         there.partition.world_size == here.partition.world_size &&
         there.partition.all_shards == here.partition.all_shards && there.path_count == here.path_count &&
         same_chunks(there, here);
}

bool EngineImplementation::agree_all_good(bool good) {
  double bad = good ? 0 : 1;
  sum_over_all(*communicator_, {&bad, 1});
  return bad == 0;
}

// Where this rank's own failure has ended the communicator, it is that failure which is thrown.
void EngineImplementation::sum_over_all(Communicator& communicator, std::span<double> values) {
  try {
    communicator.all_reduce_sum(values);
  } catch (const CommunicationError&) {
    if (executor_) {
      const Lock lock(executor_->mutex());
      executor_->check(lock);
    }
    throw;
  }
}

// Where a committed run goes whose chunks lie otherwise than this one's, until it is loaded.
std::string EngineImplementation::moved_path(std::size_t path) const {
  return config_.nvme.paths[path] + "/ballast-moved";
}

// By the first rank, for all: nothing is copied.
void EngineImplementation::move_stored_run() {
  for (std::size_t i = config_.nvme.paths.size(); i-- > 0;) {
    engine::remove_folder(moved_path(i));
    engine::make_folder(moved_path(i));
    const auto files = io::make_small_files(config_.nvme.paths[i]);
    // The manifests last: what an interruption leaves has them on one side, the chunks of both sides with them or not,
    // which is then seen as missing, never as current.
    std::vector<std::string> names = files->list();
    std::stable_partition(names.begin(), names.end(), [](const std::string& n) { return n.ends_with(".chunks"); });
    for (const std::string& name : names) {
      if (name.starts_with("ballast-rank")) files->rename(name, "ballast-moved/" + name);
    }
    files->flush_directory();
  }
}

// Before this run saves its own beside them: it could not be told from them which run is which.
void EngineImplementation::meet_checkpoints(const CommitOptions& options) {
  const std::string& folder = options.checkpoints;
  std::uint64_t newest = UINT64_MAX;
  std::string failure;
  if (communicator_->rank() == 0) {
    try {
      if (options.existing == ExistingRun::resume) engine::tidy_checkpoints(folder);
      if (options.existing == ExistingRun::overwrite) engine::remove_checkpoints(folder);
      if (const auto there = engine::list_checkpoints(folder); !there.empty()) newest = there.front().first;
    } catch (const IoError& error) {
      failure = error.what();
    }
  }
  if (!agree_all_good(failure.empty())) {
    throw IoError(failure.empty() ? "the folder of checkpoints " + folder + " cannot be made ready by the first rank"
                                  : failure);
  }
  communicator_->broadcast(std::as_writable_bytes(std::span(&newest, 1)), 0);
  if (options.existing != ExistingRun::refuse || newest == UINT64_MAX) return;
  throw ConfigError("folder " + folder + " holds checkpoints of a run, the newest of step " + std::to_string(newest) +
                    "; go on from it, say that they may be overwritten (ballast train: --resume, --overwrite), or name "
                    "another folder");
}

// Every rank finds the same, or all of them throw. A run that is gone on from in place is returned; one that has to be
// loaded is left in sources_.
std::optional<EngineImplementation::StoredRun> EngineImplementation::find_stored_run(const CommitOptions& options) {
  constexpr std::uint64_t kNothing = UINT64_MAX;
  const bool resume = options.existing == ExistingRun::resume;
  const bool first_rank = communicator_->rank() == 0;
  const std::string& directory = config_.nvme.paths.front();

  // What every rank has.
  constexpr std::size_t kMost = 2;
  std::array<std::uint64_t, kMost> mine;
  mine.fill(kNothing);
  StoredRun run;
  std::string damage;
  std::vector<std::uint64_t> steps;
  std::optional<engine::ManifestLog> log;
  if (plan_.uses_nvme) {
    // Whoever still holds the chunks may still commit: a killed process, for a moment.
    engine::wait_until_unlocked(directory + "/" + io::ChunkStore::file_name(plan_.rank));
    log.emplace(manifest_log());
    steps = log->steps();
    std::size_t found = 0;
    for (const std::uint64_t step : steps) {
      if (found == kMost || !resume) break;
      try {
        log->load(step, &run.layout, &run.manifest);
        mine[found++] = step;
      } catch (const CorruptionError& error) {
        if (damage.empty()) damage = error.what();
      }
    }
  }
  const auto ranks = static_cast<std::size_t>(communicator_->world_size());
  std::vector<std::uint64_t> all(kMost * ranks), counts(ranks);
  const std::uint64_t files = steps.size();
  communicator_->all_gather(std::as_bytes(std::span(&files, 1)), std::as_writable_bytes(std::span(counts)));
  communicator_->all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  const bool any = std::any_of(counts.begin(), counts.end(), [](std::uint64_t count) { return count > 0; });
  std::uint64_t moved_step = kNothing;
  if (plan_.uses_nvme && first_rank) {
    const auto moved = engine::ManifestLog::steps_of(*io::make_small_files(moved_path(0)));
    if (!moved.empty()) moved_step = moved.front();
  }
  communicator_->broadcast(std::as_writable_bytes(std::span(&moved_step, 1)), 0);
  if (!options.checkpoints.empty()) meet_checkpoints(options);

  if (!resume) {
    if (!any && moved_step == kNothing) return std::nullopt;
    if (options.existing == ExistingRun::refuse) {
      throw ConfigError("storage path " + directory + " holds a committed run" +
                        (steps.empty() ? std::string() : ", step " + std::to_string(steps.front())) +
                        "; go on from it, or say that it may be overwritten (ballast train: --resume, --overwrite)");
    }
    log->remove_all();
    for (std::size_t i = 0; first_rank && i < config_.nvme.paths.size(); ++i) engine::remove_folder(moved_path(i));
    communicator_->barrier();
    return std::nullopt;
  }
  if ((any || moved_step != kNothing) && !plan_.durable) {
    throw ConfigError("storage path " + directory +
                      " holds a committed run, and with durability \"none\" going on would destroy it: set durability "
                      "to \"step\" or {\"every\": N}, or name another path");
  }

  // The newest step below `limit` whose manifest every rank has.
  const auto newest_below = [&](std::uint64_t limit) {
    std::optional<std::uint64_t> found;
    for (const std::uint64_t step : all) {
      if (step == kNothing || step >= limit || (found && step <= *found)) continue;
      bool everywhere = true;
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        const auto begin = all.begin() + static_cast<std::ptrdiff_t>(kMost * rank);
        everywhere = everywhere && std::find(begin, begin + kMost, step) != begin + kMost;
      }
      if (everywhere) found = step;
    }
    return found;
  };
  const std::optional<std::uint64_t> chosen = newest_below(kNothing);

  // Checkpoints, newest first, as the first rank sees them.
  std::string texts;
  if (first_rank && !options.checkpoints.empty()) {
    const auto itself = engine::ManifestLog::steps_of(*io::make_small_files(options.checkpoints));
    if (!itself.empty()) texts += std::to_string(itself.front()) + " " + options.checkpoints + "\n";
    for (const auto& [number, folder] : engine::list_checkpoints(options.checkpoints)) {
      const auto inside = engine::ManifestLog::steps_of(*io::make_small_files(folder));
      if (!inside.empty()) texts += std::to_string(inside.front()) + " " + folder + "\n";
    }
  }
  std::uint64_t length = texts.size();
  communicator_->broadcast(std::as_writable_bytes(std::span(&length, 1)), 0);
  texts.resize(length);
  if (length > 0) communicator_->broadcast(std::as_writable_bytes(std::span(texts)), 0);
  std::istringstream lines(texts);
  std::vector<std::pair<std::uint64_t, std::vector<std::string>>> sources;
  for (std::uint64_t step = 0; lines >> step;) {
    std::string folder;
    std::getline(lines >> std::ws, folder);
    sources.push_back({step, {folder}});
  }

  std::vector<std::string> moved_paths;
  for (std::size_t i = 0; i < config_.nvme.paths.size(); ++i) moved_paths.push_back(moved_path(i));
  bool in_place = chosen.has_value();
  if (chosen) {
    log->load(*chosen, &run.layout, &run.manifest);
    in_place = agree_all_good(same_place(run.layout));
    if (in_place) require_same_model(run.layout, directory);
    for (const auto& [step, paths] : sources) in_place = in_place && step <= *chosen;
  }
  if (in_place) {
    run.path = log->path(*chosen);
    run.state.run_identity = run.layout.run_identity;
    run.state.chunks = run.manifest.chunks;
    if (const std::optional<std::uint64_t> older = newest_below(*chosen)) {
      StoredLayout layout;
      log->load(*older, &layout, &run.older.emplace());
      if (!agree_all_good(same_place(layout))) run.older.reset();
    }
    const bool newest = agree_all_good(damage.empty() && *chosen == steps.front());
    if (!newest && environment_.log) {
      environment_.log(LogLevel::warning, "going on from step " + std::to_string(*chosen) +
                                              ", as a later one is not whole on every rank" +
                                              (damage.empty() ? "" : ": " + damage));
    }
    return run;
  }
  if ((any || !sources.empty() || moved_step != kNothing) && !unit_communicators_.empty()) {
    throw ConfigError(
        "the run in " + directory +
        " is not in the same chunks and ranks, and with units that have communicators of their own it can "
        "only be gone on from in place");
  }
  // Other ranks or chunks, or a checkpoint that is newer: what is there moves aside, and the newest is loaded.
  if (any) {
    communicator_->barrier();
    if (first_rank) {
      move_stored_run();
      const auto moved = engine::ManifestLog::steps_of(*io::make_small_files(moved_path(0)));
      moved_step = moved.empty() ? kNothing : moved.front();
    }
    communicator_->broadcast(std::as_writable_bytes(std::span(&moved_step, 1)), 0);
  }
  if (moved_step != kNothing) {
    const auto known = engine::ManifestLog::steps_of(*io::make_small_files(moved_path(0)));
    for (const std::uint64_t step : known) sources.push_back({step, moved_paths});
  }
  std::stable_sort(sources.begin(), sources.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  sources_ = std::move(sources);
  return std::nullopt;
}

// All of it is read and checked, as what a later, uncommitted step has written may lie over an older one, and damage is
// better seen while that one is whole.
void EngineImplementation::restore_stored_run(StoredRun& stored) {
  std::uint64_t most = 0;
  for (const engine::ChunkPlacement& place : plan_.placement) most = std::max(most, place.stored_bytes);
  engine::ExtentBuffer extent(most);
  const auto damage = [&](const engine::Manifest& manifest) -> std::string {
    executor_->note_steps(manifest.step);
    try {
      for (std::uint32_t c = 0; c < plan_.layout.chunks.size(); ++c) executor_->restore_chunk(c, extent.data());
    } catch (const CorruptionError& error) {
      return error.what();
    }
    return "";
  };
  std::string found = damage(stored.manifest);
  if (agree_all_good(found.empty())) return;
  const std::string newest = "step " + std::to_string(stored.manifest.step);
  if (found.empty()) found = newest + " is not whole on another rank";
  if (!stored.older) throw CorruptionError(found + "; there is no committed step before it to go on from");
  stored.manifest = std::move(*stored.older);
  stored.path = manifest_log().path(stored.manifest.step);
  executor_->set_stored_chunks(stored.manifest.chunks);
  const std::string older = damage(stored.manifest);
  if (!agree_all_good(older.empty())) {
    throw CorruptionError(found + "; nor is the committed step before it whole" +
                          (older.empty() ? " on another rank" : ": " + older));
  }
  if (environment_.log) {
    environment_.log(LogLevel::warning, "going on from step " + std::to_string(stored.manifest.step) + ", as " +
                                            newest + " is damaged: " + found);
  }
}

void EngineImplementation::begin_durable(std::optional<StoredRun> stored) {
  if (plan_.durable) {
    StoredLayout layout = stored_layout();
    layout.run_identity = executor_->run_identity();
    for (std::uint32_t c = 0; c < layout.chunks.size(); ++c) {
      layout.chunks[c].offset_bytes = executor_->store().offset_bytes(c);
      layout.chunks[c].slot_bytes = executor_->store().slot_bytes(c);
    }
    std::optional<std::uint64_t> step;
    if (stored) {
      restore_stored_run(*stored);
      step = stored->manifest.step;
      for (std::size_t u = 0; u < units_.size(); ++u) units_[u].step_counts = stored->manifest.step_counts[u];
      loss_scaler_.restore(stored->manifest.loss_scale);
      steps_updated_ = stored->manifest.step;
      executor_->note_steps(steps_updated_);
      last_user_bytes_ = stored->manifest.user_bytes;
      resumed_ = ResumedStep{stored->manifest.step, std::move(stored->manifest.user_bytes), std::move(stored->path)};
      initialized_ = true;
    }
    committer_ =
        std::make_unique<engine::StepCommitter>(*executor_, several_ranks() ? communicator_->duplicate() : nullptr,
                                                manifest_log(), engine::encode_layout(layout), step);
    if (several_ranks()) save_communicator_ = communicator_->duplicate();
  }
  if (!sources_.empty()) load_states();
}

// Under the mutex, right after the step's decision: what is said here is of after it.
void EngineImplementation::request_commit(std::span<const std::byte> user_bytes) {
  engine::Manifest manifest = manifest_of_now();
  manifest.user_bytes.assign(user_bytes.begin(), user_bytes.end());
  committer_->request(std::move(manifest));
}

// Nothing of the next step may be written before the last one is committed. Which updates have still to be asked for
// follows from the trainer's calls alone, as it must be the same on all ranks.
void EngineImplementation::finish_commit(Lock& lock) {
  if (!committer_ || !committer_->pending()) return;
  for (std::uint32_t u = 0; u < units_.size() && plan_.timing == Timing::just_in_time; ++u) {
    if (!units_[u].decided || units_[u].opened) continue;
    if (several_ranks() || executor_->scheduler().unit_update_due(u)) force_updates(lock, u);
  }
  executor_->wait(lock, [&] { return !committer_->pending(); });
}

std::optional<std::uint64_t> EngineImplementation::committed_step() const {
  if (!committer_) return std::nullopt;
  const Lock lock(executor_->mutex());
  return committer_->committed_step();
}

}  // namespace ballast
