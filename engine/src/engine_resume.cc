// What a run goes on from: the committed steps and checkpoints that are there from before, and which of them it is to
// be. SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>

#include <algorithm>
#include <array>
#include <exception>
#include <functional>
#include <sstream>

#include "durable/checkpoints.h"
#include "engine_implementation.h"
#include "extent_buffer.h"

namespace ballast {

using engine::StoredLayout;

namespace {

constexpr std::uint64_t kNothing = UINT64_MAX;
constexpr std::size_t kKnownSteps = 2;                 // committed ones that a rank still has
constexpr const char* kMovingMark = "ballast-moving";  // under the first path, while a run is being moved aside

}  // namespace

// What the storage paths of all ranks hold.
struct EngineImplementation::CommittedSteps {
  std::vector<std::uint64_t> own;        // of this rank, newest first, damaged ones too
  std::vector<std::uint64_t> of_all;     // kKnownSteps for each rank: those it could read
  bool any = false;                      // on any rank
  std::uint64_t moved = kNothing;        // of a run that has been moved aside
  std::uint64_t interrupted = kNothing;  // of a run that ended within its first commit
  std::string damage;                    // of this rank's newest

  void forget_own() {
    own.clear();
    std::fill(of_all.begin(), of_all.end(), kNothing);
    any = false;
    damage.clear();
  }
  // The newest below `limit` whose manifest every rank has.
  std::optional<std::uint64_t> newest_below(std::uint64_t limit) const {
    std::optional<std::uint64_t> found;
    for (const std::uint64_t step : of_all) {
      if (step == kNothing || step >= limit || (found && step <= *found)) continue;
      bool everywhere = true;
      for (auto rank = of_all.begin(); rank != of_all.end(); rank += kKnownSteps) {
        everywhere = everywhere && std::find(rank, rank + kKnownSteps, step) != rank + kKnownSteps;
      }
      if (everywhere) found = step;
    }
    return found;
  }
};

// Where a committed run goes whose chunks lie otherwise than this one's, until it is loaded.
std::string EngineImplementation::moved_path(std::size_t path) const {
  return config_.nvme.paths[path] + "/ballast-moved";
}

// What only one does, and all wait for: they throw where it does.
template <class Work>
void EngineImplementation::on_first_rank(const Work& work) {
  std::exception_ptr failure;
  if (communicator_->rank() == 0) {
    try {
      work();
    } catch (const Error&) {
      failure = std::current_exception();
    }
  }
  if (agree_all_good(!failure)) return;
  if (failure) std::rethrow_exception(failure);
  throw IoError("the first rank cannot move aside the run in storage path " + config_.nvme.paths.front());
}

// By the first rank, for all: nothing is copied. What has been moved before is older than a run that every rank has
// committed, which is why that one had not been removed yet.
void EngineImplementation::move_stored_run() {
  forget_moved_run();
  const std::string count = std::to_string(config_.nvme.paths.size());
  io::publish(*io::make_small_files(config_.nvme.paths.front()), kMovingMark, std::as_bytes(std::span(count)));
  finish_interrupted_move();
}

// By the first rank. As long as the mark is there nothing else has been written: what is left of the run is moved too.
void EngineImplementation::finish_interrupted_move() {
  const auto first = io::make_small_files(config_.nvme.paths.front());
  const std::vector<std::string> there = first->list();
  if (std::find(there.begin(), there.end(), kMovingMark) == there.end()) return;
  const std::vector<std::byte> mark = first->read(kMovingMark);
  const std::string count(reinterpret_cast<const char*>(mark.data()), mark.size());
  if (count != std::to_string(config_.nvme.paths.size())) {
    throw ConfigError("moving aside the run in storage path " + config_.nvme.paths.front() +
                      " was interrupted, which had " + count + " paths, and here are " +
                      std::to_string(config_.nvme.paths.size()) + "; start once with its nvme.paths in their order");
  }
  for (std::size_t i = 0; i < config_.nvme.paths.size(); ++i) {
    engine::make_folder(moved_path(i));
    const auto files = io::make_small_files(config_.nvme.paths[i]);
    for (const std::string& name : files->list()) {
      if (name.starts_with("ballast-rank")) files->rename(name, "ballast-moved/" + name);
    }
    io::make_small_files(moved_path(i))->flush_directory();
    files->flush_directory();
  }
  first->remove(kMovingMark);
  first->flush_directory();
}

EngineImplementation::CommittedSteps EngineImplementation::committed_steps(bool read) {
  CommittedSteps found;
  std::array<std::uint64_t, kKnownSteps> mine;
  mine.fill(kNothing);
  if (plan_.uses_nvme) {
    // Whoever still holds the chunks may still commit: a killed process, for a moment.
    engine::wait_until_unlocked(config_.nvme.paths.front() + "/" + io::ChunkStore::file_name(plan_.rank));
    engine::ManifestLog log = manifest_log();
    found.own = log.steps();
    std::size_t count = 0;
    for (const std::uint64_t step : found.own) {
      if (count == kKnownSteps || !read) break;
      StoredLayout layout;
      engine::Manifest manifest;
      try {
        log.load(step, &layout, &manifest);
        mine[count++] = step;
      } catch (const CorruptionError& error) {
        if (found.damage.empty()) found.damage = error.what();
      }
    }
  }
  const auto ranks = static_cast<std::size_t>(communicator_->world_size());
  found.of_all.resize(kKnownSteps * ranks);
  std::vector<std::uint64_t> counts(ranks);
  const std::uint64_t count = found.own.size();
  communicator_->all_gather(std::as_bytes(std::span(&count, 1)), std::as_writable_bytes(std::span(counts)));
  communicator_->all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(found.of_all)));
  found.any = std::any_of(counts.begin(), counts.end(), [](std::uint64_t each) { return each > 0; });
  found.moved = moved_step();
  if (found.any) found.interrupted = interrupted_step(found);
  return found;
}

// The first commit of a run, of its initial values or of what it has loaded, was not made by every rank: the only step
// that is there, on some of them.
std::uint64_t EngineImplementation::interrupted_step(const CommittedSteps& found) {
  const std::array<std::uint64_t, 2> own = {found.own.size(), found.own.empty() ? kNothing : found.own.front()};
  std::vector<std::uint64_t> of_all(2 * static_cast<std::size_t>(communicator_->world_size()));
  communicator_->all_gather(std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(of_all)));
  std::uint64_t step = kNothing;
  if (communicator_->rank() == 0) {
    const std::shared_ptr<io::SmallFiles> files = committed_files();
    std::vector<std::uint64_t> steps = engine::ManifestLog::steps_of(*files);
    std::uint32_t from_first = 0;  // ranks that have one
    for (std::size_t rank = 0; rank < of_all.size() / 2; ++rank) {
      if (of_all[2 * rank] > 0) steps.push_back(of_all[2 * rank + 1]);
      if (of_all[2 * rank] > 1) steps.push_back(kNothing);  // it has committed before
      if (of_all[2 * rank] > 0 && from_first == rank) ++from_first;
    }
    const bool one = std::adjacent_find(steps.begin(), steps.end(), std::not_equal_to<>()) == steps.end();
    if (one && !engine::has_all_ranks(files, steps.front(), from_first)) step = steps.front();
  }
  communicator_->broadcast(std::as_writable_bytes(std::span(&step, 1)), 0);
  return step;
}

// As the first rank sees it.
std::uint64_t EngineImplementation::moved_step() {
  std::uint64_t step = kNothing;
  if (plan_.uses_nvme && communicator_->rank() == 0) {
    const auto moved = engine::ManifestLog::steps_of(*io::make_small_files(moved_path(0)));
    if (!moved.empty()) step = moved.front();
  }
  communicator_->broadcast(std::as_writable_bytes(std::span(&step, 1)), 0);
  return step;
}

// A run's manifests lie under the first of its paths: under another one they are those of a run whose paths were
// others, or in another order, and this one would write over its chunks.
void EngineImplementation::meet_runs_of_other_paths(const CommitOptions& options) {
  const std::vector<std::string>& paths = config_.nvme.paths;
  const bool overwrite = options.existing == ExistingRun::overwrite;
  std::string other, place;
  for (std::size_t i = 0; plan_.uses_nvme && !overwrite && i < paths.size(); ++i) {
    const auto stored = io::ChunkStore::stored_place(paths[i], plan_.rank);
    const bool kept = stored && stored->slots_per_chunk > 1;  // by durable steps
    if (!kept || (stored->path_index == i && stored->path_count == paths.size())) continue;
    place = "storage path " + paths[i] + " holds chunks of a run with durable steps, of whose " +
            std::to_string(stored->path_count) + " paths it is number " + std::to_string(stored->path_index + 1);
  }
  for (std::size_t i = 1; plan_.uses_nvme && i < paths.size(); ++i) {
    const std::string& path = paths[i];
    const bool first_rank = communicator_->rank() == 0;
    if (overwrite) {
      engine::ManifestLog(io::make_small_files(path), plan_.rank).remove_all();
      if (first_rank) engine::remove_folder(moved_path(i));
    } else if (first_rank) {
      const auto holds = [](const std::string& folder) {
        return !engine::ManifestLog::steps_of(*io::make_small_files(folder)).empty();
      };
      if (other.empty() && (holds(path) || holds(moved_path(i)))) other = path;
    }
  }
  if (place.empty() && !other.empty()) {
    place = "storage path " + other + " holds a committed run whose first path it is, and is not the first here";
  }
  if (agree_all_good(place.empty())) return;
  if (place.empty()) place = "a storage path of another rank holds part of a run with other nvme.paths";
  throw ConfigError(place +
                    "; name that run's paths in their order to go on from it, name others, or say that it may be "
                    "overwritten (ballast train: --overwrite)");
}

// Of the committed run in place.
void EngineImplementation::forget_manifests() {
  manifest_log().remove_all();
  if (communicator_->rank() == 0) {
    // A larger world may have left more than this one has ranks.
    const std::shared_ptr<io::SmallFiles> files = committed_files();
    for (const std::uint64_t step : engine::ManifestLog::steps_of(*files)) {
      for (const std::uint32_t rank : engine::ManifestLog::ranks_of(*files, step)) {
        if (rank >= plan_.world_size) engine::ManifestLog(files, rank).remove_all();
      }
    }
  }
  communicator_->barrier();
}

void EngineImplementation::forget_moved_run() {
  for (std::size_t i = 0; communicator_->rank() == 0 && i < config_.nvme.paths.size(); ++i) {
    engine::remove_folder(moved_path(i));
  }
}

void EngineImplementation::forget_stored_run() {
  forget_manifests();
  forget_moved_run();
  communicator_->barrier();
}

// Before this run saves its own beside them: it could not be told from them which run is which.
void EngineImplementation::meet_checkpoints(const CommitOptions& options) {
  const std::string& folder = options.checkpoints;
  const bool resume = options.existing == ExistingRun::resume;
  std::array<std::uint64_t, 2> words = {kNothing, 0};  // what the first rank finds
  auto& [newest, is_checkpoint] = words;
  std::string failure;
  if (communicator_->rank() == 0) {
    try {
      is_checkpoint = engine::ManifestLog::steps_of(*io::make_small_files(folder)).empty() ? 0 : 1;
      if (resume) engine::tidy_checkpoints(folder);
      if (options.existing == ExistingRun::overwrite && is_checkpoint == 0) engine::remove_checkpoints(folder);
      if (const auto there = engine::list_checkpoints(folder); !there.empty()) newest = there.front().first;
    } catch (const IoError& error) {
      failure = error.what();
    }
  }
  if (!agree_all_good(failure.empty())) {
    throw IoError(failure.empty() ? "the folder of checkpoints " + folder + " cannot be made ready by the first rank"
                                  : failure);
  }
  communicator_->broadcast(std::as_writable_bytes(std::span(words)), 0);
  if (is_checkpoint != 0 && !resume) {
    throw ConfigError(folder +
                      " is a checkpoint, not a folder to save checkpoints in; name the folder around it, or "
                      "go on from it (ballast train: --resume)");
  }
  if (options.existing != ExistingRun::refuse || newest == kNothing) return;
  throw ConfigError("folder " + folder + " holds checkpoints of a run, the newest of step " + std::to_string(newest) +
                    "; go on from it, say that they may be overwritten (ballast train: --resume, --overwrite), or name "
                    "another folder");
}

// Newest first, as the first rank sees them.
std::vector<EngineImplementation::Source> EngineImplementation::checkpoints_in(const std::string& folder) {
  std::string texts;
  if (communicator_->rank() == 0 && !folder.empty()) {
    const auto add = [&](const std::string& path) {
      const auto steps = engine::ManifestLog::steps_of(*io::make_small_files(path));
      if (!steps.empty()) texts += std::to_string(steps.front()) + " " + path + "\n";
    };
    add(folder);
    for (const auto& [number, path] : engine::list_checkpoints(folder)) add(path);
  }
  std::uint64_t length = texts.size();
  communicator_->broadcast(std::as_writable_bytes(std::span(&length, 1)), 0);
  texts.resize(length);
  if (length > 0) communicator_->broadcast(std::as_writable_bytes(std::span(texts)), 0);
  std::istringstream lines(texts);
  std::vector<Source> sources;
  for (std::uint64_t step = 0; lines >> step;) {
    std::string path;
    std::getline(lines >> std::ws, path);
    sources.push_back({step, {path}});
  }
  return sources;
}

// The committed step itself, where its chunks lie as this run's do. Nothing where they lie otherwise.
std::optional<EngineImplementation::StoredRun> EngineImplementation::stored_in_place(const CommittedSteps& found,
                                                                                     std::uint64_t step) {
  engine::ManifestLog log = manifest_log();
  StoredRun run;
  log.load(step, &run.layout, &run.manifest);
  if (!agree_all_good(same_place(run.layout))) return std::nullopt;
  if (!agree_all_good(places_in(run.layout, config_.nvme.paths.front()).as_here)) return std::nullopt;
  run.path = log.path(step);
  run.state.run_identity = run.layout.run_identity;
  run.state.chunks = run.manifest.chunks;
  if (const std::optional<std::uint64_t> older = found.newest_below(step)) {
    StoredLayout layout;
    log.load(*older, &layout, &run.older.emplace());
    if (!agree_all_good(same_place(layout))) run.older.reset();
  }
  const bool newest = agree_all_good(found.damage.empty() && step == found.own.front());
  if (!newest && environment_.log) {
    environment_.log(LogLevel::warning, "going on from step " + std::to_string(step) +
                                            ", as a later one is not whole on every rank" +
                                            (found.damage.empty() ? "" : ": " + found.damage));
  }
  return run;
}

// Every rank finds the same, or all of them throw. A run that is gone on from in place is returned; one that has to be
// loaded is left in sources_.
std::optional<EngineImplementation::StoredRun> EngineImplementation::find_stored_run(const CommitOptions& options) {
  const bool resume = options.existing == ExistingRun::resume;
  const std::string& directory = config_.nvme.paths.front();
  if (plan_.uses_nvme) on_first_rank([&] { finish_interrupted_move(); });
  CommittedSteps found = committed_steps(resume);
  const bool stored = found.any || found.moved != kNothing;
  if (!options.checkpoints.empty()) meet_checkpoints(options);
  meet_runs_of_other_paths(options);
  if (stored && options.existing == ExistingRun::refuse) {
    throw ConfigError("storage path " + directory + " holds a committed run" +
                      (found.own.empty() ? std::string() : ", step " + std::to_string(found.own.front())) +
                      "; go on from it, or say that it may be overwritten (ballast train: --resume, --overwrite)");
  }
  if (stored && !resume) forget_stored_run();
  if (!resume) return std::nullopt;
  if (stored && !plan_.durable) {
    throw ConfigError("storage path " + directory +
                      " holds a committed run, and with durability \"none\" going on would destroy it: set durability "
                      "to \"step\" or {\"every\": N}, or name another path");
  }

  std::vector<Source> sources = checkpoints_in(options.checkpoints);
  // What it began from, before any step or from what it had loaded, is still there.
  if (found.interrupted != kNothing && (found.interrupted == 0 || found.moved != kNothing || !sources.empty())) {
    if (environment_.log && plan_.rank == 0) {
      environment_.log(LogLevel::warning, "a run in " + directory + " ended within its first commit (step " +
                                              std::to_string(found.interrupted) + ") and counts for nothing");
    }
    forget_manifests();
    found.forget_own();
  }
  if (const std::optional<std::uint64_t> chosen = found.newest_below(kNothing)) {
    const bool newest = std::all_of(sources.begin(), sources.end(), [&](const auto& s) { return s.first <= *chosen; });
    if (newest) {
      if (std::optional<StoredRun> run = stored_in_place(found, *chosen)) return run;
    }
  }
  if ((found.any || found.moved != kNothing || !sources.empty()) && !unit_communicators_.empty()) {
    throw ConfigError(
        "the run in " + directory +
        " is not in the same chunks and ranks, and with units that have communicators of their own it can "
        "only be gone on from in place");
  }
  // Other ranks or chunks, or a checkpoint that is newer: what is there moves aside, and the newest is loaded.
  if (found.any) {
    if (found.moved != kNothing && !agree_all_good(found.damage.empty())) {
      throw CorruptionError(
          (found.damage.empty() ? "the run in " + directory + " is damaged on another rank" : found.damage) +
          "; the run that it has gone on from is in " + moved_path(0) + ": move its files back to go on from that one");
    }
    on_first_rank([&] { move_stored_run(); });
    found.moved = moved_step();
  }
  if (found.moved != kNothing) {
    std::vector<std::string> paths;
    for (std::size_t i = 0; i < config_.nvme.paths.size(); ++i) paths.push_back(moved_path(i));
    for (const std::uint64_t step : engine::ManifestLog::steps_of(*io::make_small_files(paths.front()))) {
      sources.emplace_back(step, paths);
    }
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

}  // namespace ballast
