// What several ranks agree on: at the start what they were given, that the memory of a machine holds all its ranks; per
// step which parameters have a gradient. And values that each rank holds a part of.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/size.h>
#include <ballast/communicators/agreement.h>
#include <ballast/offload/machine_share.h>
#include <ballast/offload/topology.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "engine_implementation.h"

namespace ballast {

using engine::ParameterLayout;
using engine::UnitLayout;

// All that the numbers and the order of collectives follow from. Paths, threads and queues are each rank's own.
void EngineImplementation::agree_on_start() {
  if (communicator_->world_size() == 1) return;
  std::vector<NamedValue> values = {{"library version", BALLAST_VERSION}};
  const auto configuration = nlohmann::ordered_json::parse(config_.to_json());
  for (const auto& [key, value] : configuration.items()) {
    if (key != "nvme" && key != "threads") values.push_back({"configuration key " + key, value.dump()});
  }
  for (std::size_t u = 0; u < specs_.size(); ++u) {
    const engine::UnitSpec& unit = specs_[u];
    const bool own = unit.communicator != 0;
    std::string text;
    if (own) {
      text = "communicator " + std::to_string(unit.communicator) + ", of " +
             std::to_string(unit_communicators_[unit.communicator - 1].communicator->world_size()) + " ranks: ";
    }
    if (divisors_[u]) {
      char divisor[64];
      std::snprintf(divisor, sizeof divisor, "gradient_divisor %.17g: ", *divisors_[u]);
      text += divisor;
    }
    // Names may differ where the members do; those are compared among them.
    values.push_back({own ? "unit " + std::to_string(u) + ", with a communicator of its own" : "unit " + unit.name,
                      text + parameters_text(unit, !own)});
  }
  std::string order = std::to_string(expected_micro_batches_) + " micro-batches:";
  for (const ExpectedAccess& access : expected_order_) {
    order += " " + std::to_string(access.unit.index) + (access.parameters ? "p" : "") + (access.gradient ? "g" : "") +
             std::to_string(access.open_through);
  }
  values.push_back({"expected order", order});
  check_agreement(*communicator_, values);
}

// What is this rank's of the machine: threads, cores, NUMA node.
void EngineImplementation::divide_machine() {
  const offload::Topology topology = offload::discover_topology();
  const std::vector<std::string> texts = gather_texts(*communicator_, offload::machine_text(topology));
  share_ = offload::machine_share(topology, texts, static_cast<std::size_t>(communicator_->rank()));
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
      gather_texts(*communicator_, std::to_string(wanted) + " " + std::to_string(free) + " " + host);
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
                    " of memory together (this one " + base::format_size(wanted) + "), and " +
                    base::format_size(least_free) +
                    " are free, by the machine and its memory cgroup; lower budget.host and budget.device, which are "
                    "per rank, or start fewer ranks on this machine");
  }
}

// A parameter has a gradient where any rank of its unit has one. One small exchange as long as none is absent anywhere.
// adds: finish_backward has been given a function; so has every rank then.
void EngineImplementation::agree_on_presence(bool adds) {
  const auto any_absent = [](const UnitState& unit) {
    return unit.trainable && std::find(unit.present.begin(), unit.present.end(), 0) != unit.present.end();
  };
  double flags[2] = {std::any_of(units_.begin(), units_.end(), any_absent) ? 1.0 : 0.0, adds ? 1.0 : 0.0};
  communicator_->all_reduce_sum(flags);
  if (flags[1] != 0 && flags[1] != communicator_->world_size()) {
    throw UsageError("finish_backward was given a function that adds what other engines have on " +
                     std::to_string(static_cast<int>(flags[1])) + " of " + std::to_string(communicator_->world_size()) +
                     " ranks; give it on all or on none");
  }
  if (flags[0] == 0) return;
  for (std::uint32_t number = 0; number <= unit_communicators_.size(); ++number) {
    std::vector<double> present;
    const auto each_parameter = [&](const auto& visit) {
      for (std::size_t u = 0; u < units_.size(); ++u) {
        if (plan_.layout.units[u].communicator != number) continue;
        for (std::uint8_t& each : units_[u].present) visit(each);
      }
    };
    each_parameter([&](std::uint8_t& each) { present.push_back(each); });
    (number == 0 ? *communicator_ : *unit_communicators_[number - 1].communicator).all_reduce_sum(present);
    std::size_t at = 0;
    each_parameter([&](std::uint8_t& each) { each = present[at++] > 0 ? 1 : 0; });
  }
}

// The first rank that knows one names it for all.
void EngineImplementation::agree_on_name(std::string& name) {
  for (const std::string& text : gather_texts(*communicator_, name)) {
    if (text.empty()) continue;
    name = text;
    return;
  }
}

// Completes a range of a parameter of which this rank has filled in the elements that it stores.
void EngineImplementation::gather_elements(ParameterId id, std::int64_t first_element, std::span<float> values) {
  const UnitLayout& unit = plan_.layout.units[id.unit];
  if (unit.partition.world_size == 1 || unit.partition.all_shards) return;
  Communicator& communicator =
      unit.communicator == 0 ? *shard_communicator_ : *unit_communicators_[unit.communicator - 1].communicator;
  const ParameterLayout& parameter = unit.parameters[id.index];
  const auto section = std::find_if(unit.sections.rbegin(), unit.sections.rend(),
                                    [&](const engine::Section& each) { return each.begin <= parameter.begin; });
  constexpr std::size_t kPiece = std::size_t{256} << 10;  // elements
  std::vector<float> all;
  for (std::size_t begin = 0; begin < values.size(); begin += kPiece) {
    const std::span<float> piece = values.subspan(begin, std::min(kPiece, values.size() - begin));
    all.resize(piece.size() * unit.partition.world_size);
    communicator.all_gather(std::as_bytes(piece), std::as_writable_bytes(std::span<float>(all)));
    for (std::size_t i = 0; i < piece.size(); ++i) {
      const std::uint64_t element =
          parameter.begin - section->begin + static_cast<std::uint64_t>(first_element) + begin + i;
      piece[i] = all[element / section->shard_elements * piece.size() + i];
    }
  }
}

}  // namespace ballast
