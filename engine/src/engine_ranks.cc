// What several ranks agree on: at the start what they were given, that the memory of a machine holds all its ranks; per
// step which parameters have a gradient. And values that each rank holds a part of.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/random.h>
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

// --- what the trainers ask for ---------------------------------------------------------------------------------------

// Between steps of stage 0 nothing is exchanged: a rank may evaluate alone.
void EngineImplementation::note_asked(Asked what, std::uint64_t value) {
  if (!several_ranks() || (!step_.active && config_.zero_stage == 0)) return;
  constexpr std::size_t kMostListed = 65536;
  asked_fingerprint_ = base::mix(asked_fingerprint_ + base::mix(value * 16 + static_cast<std::uint64_t>(what)));
  if (asked_count_++ < kMostListed) asked_.emplace_back(what, static_cast<std::uint32_t>(value));
}

std::string EngineImplementation::asked_text(Asked what, std::uint32_t value) const {
  const auto of_unit = [&](const char* call) {
    const UnitLayout& unit = plan_.layout.units[value];
    // Names may differ where communicators do.
    return call + (unit.communicator == 0 ? unit.name : "number " + std::to_string(value));
  };
  switch (what) {
    case Asked::begin_step:
      return "begin a step";
    case Asked::begin_pass:
    case Asked::begin_evaluation:
      return "begin " + std::string(what == Asked::begin_pass ? "a training" : "an evaluation") + " pass of " +
             std::to_string(value % 4096) + " micro-batches with key " + std::to_string(value / 4096);
    case Asked::acquire:
      return of_unit("acquire unit ");
    case Asked::gradients:
      return of_unit("open gradients of unit ");
    case Asked::commit:
      return of_unit("commit gradients of unit ");
    case Asked::commit_partial:
      return of_unit("commit partial gradients of unit ");
    case Asked::update:
      return "update";
    case Asked::discard:
      return "discard the step";
  }
  return "";
}

std::string EngineImplementation::step_options_text() const {
  char number[64];
  const auto add = [&](const char* format, auto value) {
    std::snprintf(number, sizeof number, format, value);
    return std::string(number);
  };
  std::string text = add("%d micro-batches", step_.options.micro_batches);
  if (step_.options.learning_rate) text += add(", learning rate %.17g", *step_.options.learning_rate);
  for (const GroupRate& rate : step_.options.group_rates) {
    text += add(", group %d", rate.group) + add(": %.17g", rate.learning_rate);
    if (rate.weight_decay) text += add(", weight decay %.17g", *rate.weight_decay);
  }
  return text;
}

// At the end of backward, before anything is waited for: ranks that have asked for different things would wait for one
// another, or mistake one unit's bytes for another's where those are of one size. adds: finish_backward has been given
// a function; so has every rank then. True where some rank has a parameter without a gradient.
bool EngineImplementation::agree_on_backward(bool adds) {
  const auto any_absent = [](const UnitState& unit) {
    return unit.trainable && std::find(unit.requested.begin(), unit.requested.end(), 0) != unit.requested.end();
  };
  const std::uint64_t mine[3] = {asked_fingerprint_, std::any_of(units_.begin(), units_.end(), any_absent) ? 1U : 0U,
                                 adds ? 1U : 0U};
  std::vector<std::uint64_t>& all = words_of_all_;
  all.resize(3 * std::size_t{plan_.world_size});
  communicator_->all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  bool same = true, absent = false;
  std::uint64_t with_function = 0;
  for (std::size_t i = 0; i < all.size(); i += 3) {
    same = same && all[i] == all.front();
    absent = absent || all[i + 1] != 0;
    with_function += all[i + 2];
  }
  if (!same) {
    std::vector<NamedValue> values = {{"options of the step", step_options_text()}};
    for (std::size_t i = 0; i < asked_.size(); ++i) {
      values.push_back({"call " + std::to_string(i + 1), asked_text(asked_[i].first, asked_[i].second)});
    }
    values.push_back({"call " + std::to_string(asked_.size() + 1),
                      asked_.size() < asked_count_ ? "one of many more" : "finish backward"});
    try {
      check_agreement(*communicator_, values);
    } catch (const CommunicationError& error) {
      throw CommunicationError(
          std::string("every rank must make the same calls in the same order, and they have not since they last met, "
                      "in finish_backward: ") +
          error.what());
    }
    throw CommunicationError("ranks have made different calls since they last met, in finish_backward");
  }
  asked_.clear();
  asked_count_ = 0;
  if (with_function != 0 && with_function != plan_.world_size) {
    throw UsageError("finish_backward was given a function that adds what other engines have on " +
                     std::to_string(with_function) + " of " + std::to_string(communicator_->world_size()) +
                     " ranks; give it on all or on none");
  }
  return absent;
}

// A parameter has a gradient where any rank of its unit has one. Where none is absent anywhere nothing is exchanged.
void EngineImplementation::agree_on_presence() {
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
