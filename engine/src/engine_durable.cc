// Durable steps as the engine sees them: what is stored of a run and must be the same where it goes on, when a step is
// committed, and that the next one waits for it.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>

#include "engine_implementation.h"

namespace ballast {

using engine::StoredLayout;

namespace {

// What of a configuration changes the numbers.
std::string fingerprint(const Config& config) {
  const auto all = nlohmann::ordered_json::parse(config.to_json());
  nlohmann::ordered_json kept;
  for (const char* section : {"precision", "optimizer", "loss_scale"}) kept[section] = all.at(section);
  kept["optimizer"].erase("timing");
  if (all.at("learning_rate_schedule").is_object()) kept["learning_rate_schedule"] = all.at("learning_rate_schedule");
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
  return text + "] " + std::string(to_string(parameter.dtype)) + ", group " + std::to_string(parameter.group);
}

std::string describe_shape(const engine::ParameterLayout& parameter) {
  const std::string all = describe(parameter);
  return all.substr(0, all.find(']') + 1);
}

// "u/a, u/b and 3 more"
class NameList {
 public:
  void add(const std::string& unit, const std::string& parameter) {
    constexpr std::size_t kShown = 8;
    if (++count_ <= kShown) text_ += (text_.empty() ? "" : ", ") + unit + "/" + parameter;
  }
  bool empty() const { return count_ == 0; }
  std::string text() const {
    const std::size_t shown = std::min<std::size_t>(count_, 8);
    return text_ + (count_ > shown ? " and " + std::to_string(count_ - shown) + " more" : "");
  }

 private:
  std::size_t count_ = 0;
  std::string text_;
};

template <class Parts>
std::map<std::string_view, std::uint32_t> by_name(const Parts& parts) {
  std::map<std::string_view, std::uint32_t> places;
  for (std::uint32_t i = 0; i < parts.size(); ++i) places.emplace(parts[i].name, i);
  return places;
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

std::shared_ptr<io::SmallFiles> EngineImplementation::committed_files() const {
  std::shared_ptr<io::SmallFiles> files = hooks_ != nullptr ? hooks_->small_files : nullptr;
  return files != nullptr ? files : io::make_small_files(config_.nvme.paths.front());
}

engine::ManifestLog EngineImplementation::manifest_log() const { return {committed_files(), plan_.rank}; }

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

// Parameters are the same by the names of unit and parameter, in whatever order. Of those that were imported only the
// shape counts. Trained or frozen is for the run that goes on to say.
EngineImplementation::StoredPlaces EngineImplementation::places_in(const StoredLayout& there,
                                                                   const std::string& where) const {
  const StoredLayout here = stored_layout();
  const bool imported = there.fingerprint == engine::kNoSettings;
  StoredPlaces found;
  NameList only_here, trained_now, frozen_now;
  std::string differs;
  const auto units = by_name(there.units);
  std::vector<std::vector<bool>> used;
  for (const StoredLayout::Unit& unit : there.units) used.emplace_back(unit.parameters.size());
  for (std::uint32_t u = 0; u < here.units.size(); ++u) {
    const StoredLayout::Unit& unit = here.units[u];
    const auto unit_there = units.find(unit.name);
    std::map<std::string_view, std::uint32_t> parameters;
    if (unit_there != units.end()) parameters = by_name(there.units[unit_there->second].parameters);
    found.places.emplace_back();
    for (std::uint32_t p = 0; p < unit.parameters.size(); ++p) {
      const engine::ParameterLayout& parameter = unit.parameters[p];
      const auto at = parameters.find(parameter.name);
      if (at == parameters.end()) {
        only_here.add(unit.name, parameter.name);
        continue;
      }
      const std::pair place(unit_there->second, at->second);
      found.places.back().push_back(place);
      used[place.first][place.second] = true;
      found.as_here = found.as_here && place == std::pair(u, p);
      const engine::ParameterLayout& stored = there.units[place.first].parameters[place.second];
      const auto text = [&](const engine::ParameterLayout& each) {
        return each.name + " " + (imported ? describe_shape(each) : describe(each));
      };
      const std::string was = text(stored), is = text(parameter);
      if (was != is && differs.empty()) differs = "in unit " + unit.name + ": " + was + " there, " + is + " here";
      if (stored.trainable == parameter.trainable || imported) continue;
      found.as_here = false;
      (parameter.trainable ? trained_now : frozen_now).add(unit.name, parameter.name);
    }
  }
  NameList only_there;
  for (std::size_t u = 0; u < used.size(); ++u) {
    for (std::size_t p = 0; p < used[u].size(); ++p) {
      if (!used[u][p]) only_there.add(there.units[u].name, there.units[u].parameters[p].name);
    }
  }
  if (!only_there.empty() || !only_here.empty()) {
    differs = (only_there.empty() ? "" : "it has " + only_there.text() + ", which are not here") +
              (only_there.empty() || only_here.empty() ? "" : "; ") +
              (only_here.empty() ? "" : "it does not have " + only_here.text());
  }
  if (!differs.empty()) throw ConfigError("the run in " + where + " is of another model: " + differs);
  if (!imported) {
    if (const std::string keys = differing_keys(there.fingerprint, here.fingerprint); !keys.empty()) {
      throw ConfigError("the run in " + where + " was made with other settings: " + keys);
    }
  }
  if (!trained_now.empty()) found.note = "trained now, from moments and step counts of zero: " + trained_now.text();
  if (!frozen_now.empty()) found.note += (found.note.empty() ? "" : "; ") + ("frozen now: " + frozen_now.text());
  return found;
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
      forget_moved_run();  // an interruption has left it, and what is in place has come after it
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
