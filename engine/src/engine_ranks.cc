// What several ranks agree on: at the start what they were given, that the memory of a machine holds all its ranks; per
// step the norm, and which parameters have a gradient.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/size.h>
#include <ballast/communicators/agreement.h>
#include <ballast/offload/topology.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "engine_implementation.h"

namespace ballast {

namespace {

// One text of at most 255 bytes from every rank.
std::vector<std::string> exchange_texts(Communicator& communicator, const std::string& text) {
  constexpr std::size_t kBytes = 256;
  const auto ranks = static_cast<std::size_t>(communicator.world_size());
  std::vector<std::byte> mine(kBytes), all(kBytes * ranks);
  std::memcpy(mine.data(), text.data(), std::min(text.size(), kBytes - 1));
  communicator.all_gather(mine, all);
  std::vector<std::string> texts;
  for (std::size_t rank = 0; rank < ranks; ++rank)
    texts.emplace_back(reinterpret_cast<const char*>(all.data() + rank * kBytes));
  return texts;
}

}  // namespace

// All that the numbers and the order of collectives follow from. Paths, threads and queues are each rank's own.
void EngineImplementation::agree_on_start() {
  if (communicator_->world_size() == 1) return;
  std::vector<NamedValue> values = {{"library version", BALLAST_VERSION}};
  const auto configuration = nlohmann::ordered_json::parse(config_.to_json());
  for (const auto& [key, value] : configuration.items()) {
    if (key != "nvme" && key != "threads") values.push_back({"configuration key " + key, value.dump()});
  }
  for (const engine::UnitSpec& unit : specs_) {
    std::string text;
    for (const ParameterSpec& parameter : unit.parameters) {
      text += parameter.name + " (";
      for (const std::int64_t dimension : parameter.shape) text += std::to_string(dimension) + " ";
      text += "group " + std::to_string(parameter.options.group);
      if (parameter.options.dtype) text += ", dtype " + std::string(to_string(*parameter.options.dtype));
      text += parameter.options.trainable ? ") " : ", frozen) ";
    }
    values.push_back({"unit " + unit.name, text});
  }
  std::string order = std::to_string(expected_micro_batches_) + " micro-batches:";
  for (const ExpectedAccess& access : expected_order_) {
    order += " " + std::to_string(access.unit.index) + (access.parameters ? "p" : "") + (access.gradient ? "g" : "") +
             std::to_string(access.open_through);
  }
  values.push_back({"expected order", order});
  check_agreement(*communicator_, values);
}

// Budgets are each rank's; what the ranks of one machine take together must fit it.
void EngineImplementation::check_machine_memory() {
  if (communicator_->world_size() == 1) return;
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  const std::uint64_t wanted = plan_.host_bytes + (device_->host_addressable() ? plan_.device_bytes : 0);
  // All look before any takes: the one slab is not missing in the next rank's view of what is free.
  const std::uint64_t free = offload::free_memory_bytes(offload::discover_topology());
  const std::vector<std::string> texts =
      exchange_texts(*communicator_, std::to_string(wanted) + " " + std::to_string(free) + " " + host);
  std::uint64_t together = 0, least_free = UINT64_MAX;
  int ranks = 0;
  for (const std::string& text : texts) {
    std::size_t end = 0, next = 0;
    const std::uint64_t its_wanted = std::stoull(text, &end);
    const std::uint64_t its_free = std::stoull(text.substr(end), &next);
    if (text.substr(end + next + 1) != host) continue;
    together += its_wanted;
    least_free = std::min(least_free, its_free);
    ++ranks;
  }
  if (together > least_free) {
    throw PlanError("the " + std::to_string(ranks) + " ranks on " + host + " take " + base::format_size(together) +
                    " of memory together, and " + base::format_size(least_free) +
                    " are free; lower the budgets, which are per rank, or start fewer ranks on this machine");
  }
}

// The order of the sum is that of shards, units and blocks, whatever the order of arrival and whoever stores them.
double EngineImplementation::local_square_sum() const {
  double sum = 0;
  for (std::uint32_t shard = 0; shard < plan_.partition.world_size; ++shard) {
    if (!plan_.partition.stores(shard)) continue;
    double shard_sum = 0;
    for (std::uint32_t c = 0; c < chunk_contributed_.size(); ++c) {
      if (!chunk_contributed_[c] || plan_.layout.chunks[c].shard != shard) continue;
      for (double block : executor_->block_sums(c)) shard_sum += block;
    }
    sum += shard_sum;
  }
  return sum;
}

// A parameter has a gradient where any rank has one. One small exchange as long as none is absent anywhere.
void EngineImplementation::agree_on_presence() {
  const auto any_absent = [](const UnitState& unit) {
    return unit.trainable && std::find(unit.present.begin(), unit.present.end(), 0) != unit.present.end();
  };
  double absent = std::any_of(units_.begin(), units_.end(), any_absent) ? 1 : 0;
  communicator_->all_reduce_sum({&absent, 1});
  if (absent == 0) return;
  std::vector<double> present;
  for (const UnitState& unit : units_) present.insert(present.end(), unit.present.begin(), unit.present.end());
  communicator_->all_reduce_sum(present);
  std::size_t at = 0;
  for (UnitState& unit : units_) {
    for (std::uint8_t& each : unit.present) each = present[at++] > 0 ? 1 : 0;
  }
}

// The first rank that knows one names it for all.
void EngineImplementation::agree_on_name(std::string& name) {
  for (const std::string& text : exchange_texts(*communicator_, name)) {
    if (text.empty()) continue;
    name = text;
    return;
  }
}

}  // namespace ballast
