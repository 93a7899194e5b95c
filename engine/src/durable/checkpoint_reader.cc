// Reading checkpoints for people and tools.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/engine/checkpoint.h>
#include <ballast/kernels/convert.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "durable/checkpoints.h"
#include "durable/stored_state.h"

namespace ballast {

std::optional<std::uint64_t> checkpoint_step(const std::string& path) {
  const std::vector<std::uint64_t> steps = engine::ManifestLog::steps_of(*io::make_small_files(path));
  return steps.empty() ? std::nullopt : std::optional(steps.front());
}

std::vector<std::pair<std::uint64_t, std::string>> checkpoints_in(const std::string& folder) {
  return engine::list_checkpoints(folder);
}

struct CheckpointReader::Implementation {
  std::string path;
  std::optional<engine::StoredState> state;
  std::vector<StoredParameter> parameters;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> places;  // unit and parameter of each
  std::vector<float> values;
  std::vector<std::uint16_t> remainders;

  std::vector<int> locks;

  ~Implementation() {
    for (const int lock : locks) ::close(lock);
  }
  // Chunks that an engine is writing over would look damaged.
  void lock(const std::vector<std::string>& paths) {
    for (const std::string& folder : paths) {
      for (const std::string& name : io::make_small_files(folder)->list()) {
        if (!name.starts_with("ballast-rank") || !name.ends_with(".chunks")) continue;
        const std::string file = folder + "/" + name;
        const int descriptor = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
        if (descriptor < 0) continue;  // reading it will say more
        locks.push_back(descriptor);
        if (::flock(descriptor, LOCK_SH | LOCK_NB) == 0 || errno != EWOULDBLOCK) continue;
        throw IoError(file + " is in use by a running engine; let it end, or read one of its checkpoints");
      }
    }
  }
  void require_range(std::size_t index, std::int64_t first, std::size_t count) const {
    if (index >= parameters.size()) throw UsageError("there is no parameter " + std::to_string(index));
    const StoredParameter& parameter = parameters[index];
    if (first >= 0 && first <= parameter.elements &&
        count <= static_cast<std::uint64_t>(parameter.elements) - static_cast<std::uint64_t>(first)) {
      return;
    }
    throw UsageError("elements from " + std::to_string(first) + " on, " + std::to_string(count) +
                     " of them, of parameter " + parameter.name + ", which has " + std::to_string(parameter.elements));
  }
};

CheckpointReader::CheckpointReader(std::vector<std::string> paths)
    : implementation_(std::make_unique<Implementation>()) {
  if (paths.empty()) throw UsageError("a CheckpointReader without a path");
  Implementation& self = *implementation_;
  const auto found = engine::find_checkpoint(paths.front());
  if (!found) throw IoError(paths.front() + " holds no checkpoint and no committed step");
  self.path = found->path;
  paths.front() = self.path;
  self.lock(paths);
  self.state.emplace(std::move(paths), found->step);
  const engine::StoredLayout& layout = self.state->layout();
  for (std::uint32_t u = 0; u < layout.units.size(); ++u) {
    for (std::uint32_t p = 0; p < layout.units[u].parameters.size(); ++p) {
      const engine::ParameterLayout& parameter = layout.units[u].parameters[p];
      self.parameters.push_back({layout.units[u].name, parameter.name, parameter.shape,
                                 static_cast<std::int64_t>(parameter.elements), parameter.dtype, parameter.group,
                                 parameter.trainable, self.state->manifest().step_counts[u][p]});
      self.places.emplace_back(u, p);
    }
  }
}

CheckpointReader::~CheckpointReader() = default;
CheckpointReader::CheckpointReader(CheckpointReader&&) noexcept = default;

const std::string& CheckpointReader::path() const { return implementation_->path; }
std::uint64_t CheckpointReader::step() const { return implementation_->state->step(); }
int CheckpointReader::world_size() const { return static_cast<int>(implementation_->state->layout().world_size); }
double CheckpointReader::loss_scale() const { return implementation_->state->manifest().loss_scale.scale; }
const std::string& CheckpointReader::settings() const { return implementation_->state->layout().fingerprint; }
std::size_t CheckpointReader::user_bytes() const { return implementation_->state->manifest().user_bytes.size(); }
const std::vector<StoredParameter>& CheckpointReader::parameters() const { return implementation_->parameters; }
std::optional<std::size_t> CheckpointReader::find(std::string_view unit, std::string_view name) const {
  const std::vector<StoredParameter>& all = parameters();
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].unit == unit && all[i].name == name) return i;
  }
  return std::nullopt;
}
std::uint64_t CheckpointReader::bytes() const { return implementation_->state->stored_bytes(); }

void CheckpointReader::read(std::size_t index, std::int64_t first_element, std::span<float> values) {
  Implementation& self = *implementation_;
  self.require_range(index, first_element, values.size());
  const auto [unit, parameter] = self.places[index];
  self.state->read(unit, parameter, static_cast<std::uint64_t>(first_element), values, {}, {});
}

void CheckpointReader::read_published(std::size_t index, std::int64_t first_element, std::int64_t count,
                                      std::byte* data) {
  Implementation& self = *implementation_;
  const auto wanted = static_cast<std::size_t>(std::max<std::int64_t>(count, 0));
  self.values.resize(wanted);
  read(index, first_element, self.values);
  switch (self.parameters[index].dtype) {
    case DataType::bf16:
      // As the split form has it, ties away from zero.
      self.remainders.resize(wanted);
      kernels::split_fp32(self.values.data(), reinterpret_cast<std::uint16_t*>(data), self.remainders.data(), wanted);
      break;
    case DataType::fp16:
      kernels::fp32_to_fp16(self.values.data(), reinterpret_cast<std::uint16_t*>(data), wanted);
      break;
    case DataType::fp32:
      std::memcpy(data, self.values.data(), wanted * 4);
      break;
  }
}

void CheckpointReader::read_moments(std::size_t index, std::int64_t first_element, std::span<float> exp_avg,
                                    std::span<float> exp_avg_sq) {
  Implementation& self = *implementation_;
  if (exp_avg.size() != exp_avg_sq.size()) throw UsageError("read_moments wants two spans of one length");
  self.require_range(index, first_element, exp_avg.size());
  const auto [unit, parameter] = self.places[index];
  self.values.resize(exp_avg.size());
  self.state->read(unit, parameter, static_cast<std::uint64_t>(first_element), self.values, exp_avg, exp_avg_sq);
}

void CheckpointReader::verify() { implementation_->state->verify(); }

}  // namespace ballast
