// Units with communicators of their own: who the members are, that they agree, and how the unit is shared out.
//
// Every rank has such a unit at the same place, so the sequence of collectives, by places, is one for all ranks of the
// world: whoever the members at a place are, they come to it in the same order as to all others, and none waits in a
// circle.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/base/random.h>
#include <ballast/communicators/agreement.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "engine_implementation.h"

namespace ballast {

// Numbers the unit's communicator as the engine meets it; 0: the engine's own.
std::uint32_t EngineImplementation::communicator_number(const std::string& unit, const UnitOptions& options) {
  if (options.gradient_divisor && !(std::isfinite(*options.gradient_divisor) && *options.gradient_divisor > 0)) {
    throw UsageError("unit " + unit + ": gradient_divisor is " + std::to_string(*options.gradient_divisor) +
                     "; finite and above 0");
  }
  if (!options.communicator) return 0;
  const Communicator& own = *options.communicator;
  if (own.world_size() > communicator_->world_size()) {
    throw UsageError("unit " + unit + " names a communicator of " + std::to_string(own.world_size()) +
                     " ranks, and the engine has " + std::to_string(communicator_->world_size()) +
                     "; a unit's ranks are among those of EngineEnvironment::communicator");
  }
  if (own.world_size() > 1 && own.name() != communicator_->name()) {
    throw UsageError("unit " + unit + " names a communicator of kind \"" + std::string(own.name()) +
                     "\", and the engine's is \"" + std::string(communicator_->name()) + "\"; make it by split()");
  }
  if (communicator_->world_size() == 1 || options.communicator == communicator_) return 0;
  const auto found =
      std::find_if(unit_communicators_.begin(), unit_communicators_.end(),
                   [&](const UnitCommunicator& each) { return each.communicator == options.communicator; });
  const auto number = static_cast<std::uint32_t>(found - unit_communicators_.begin()) + 1;
  if (found == unit_communicators_.end()) unit_communicators_.push_back({options.communicator, {}});
  return number;
}

// Makes the members of all unit communicators known, and shares the units out over them. Every rank calls it, when all
// have agreed on the places.
void EngineImplementation::meet_unit_communicators() {
  if (unit_communicators_.empty()) return;
  // A number by which the ranks of this world know each other.
  const auto now = static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  std::uint64_t world = base::mix(now ^ (static_cast<std::uint64_t>(::getpid()) << 32) ^
                                  base::mix(reinterpret_cast<std::uintptr_t>(this)));
  communicator_->broadcast(std::as_writable_bytes(std::span(&world, 1)), 0);
  const std::size_t count = unit_communicators_.size();
  const auto ranks = static_cast<std::size_t>(communicator_->world_size());
  std::vector<std::uint32_t> mine, all(2 * count * ranks);  // per communicator: its first rank, and one's place in it
  try {
    for (std::uint32_t number = 1; number <= count; ++number) {
      mine.push_back(check_members(number, world));
      mine.push_back(static_cast<std::uint32_t>(unit_communicators_[number - 1].communicator->rank()));
    }
  } catch (const std::exception& error) {
    // The members of the others have found nothing wrong, and must not wait.
    for (const UnitCommunicator& each : unit_communicators_) each.communicator->abort(error.what());
    communicator_->abort(error.what());
    throw;
  }
  communicator_->all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  for (std::size_t i = 0; i < count; ++i) {
    std::map<std::uint32_t, std::vector<std::uint32_t>> groups;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const std::uint32_t first = all[2 * (rank * count + i)], place = all[2 * (rank * count + i) + 1];
      std::vector<std::uint32_t>& group = groups[first];
      group.resize(std::max<std::size_t>(group.size(), place + 1));
      group[place] = static_cast<std::uint32_t>(rank);
    }
    unit_communicators_[i].groups.clear();
    for (auto& [first, group] : groups) unit_communicators_[i].groups.push_back(std::move(group));
  }
  forget_whole_worlds();
  for (engine::UnitSpec& spec : specs_) {
    spec.partition.reset();
    if (spec.communicator == 0) continue;
    const Communicator& own = *unit_communicators_[spec.communicator - 1].communicator;
    spec.partition =
        engine::Partition{static_cast<std::uint32_t>(own.world_size()), static_cast<std::uint32_t>(own.rank()), false};
  }
}

// A communicator of all ranks in their order is the engine's own by another name: the same numbers, to the last bit.
void EngineImplementation::forget_whole_worlds() {
  const auto ranks = static_cast<std::uint32_t>(communicator_->world_size());
  const auto shards = static_cast<std::uint32_t>(config_.communication.shard_group_size);
  if (shards != 0 && shards != ranks) return;  // what has no communicator of its own is shared out otherwise
  std::vector<std::uint32_t> world(ranks);
  std::iota(world.begin(), world.end(), 0u);
  for (std::size_t i = unit_communicators_.size(); i-- > 0;) {
    if (unit_communicators_[i].groups.size() != 1 || unit_communicators_[i].groups.front() != world) continue;
    unit_communicators_.erase(unit_communicators_.begin() + static_cast<std::ptrdiff_t>(i));
    for (engine::UnitSpec& spec : specs_) {
      if (spec.communicator == i + 1) spec.communicator = 0;
      if (spec.communicator > i + 1) --spec.communicator;
    }
  }
}

// Returns the rank, in the world, of the communicator's first. Every member calls it.
std::uint32_t EngineImplementation::check_members(std::uint32_t number, std::uint64_t world) {
  Communicator& own = *unit_communicators_[number - 1].communicator;
  struct Card {
    std::uint64_t world, rank;
  };
  const Card mine{world, static_cast<std::uint64_t>(communicator_->rank())};
  std::vector<Card> all(static_cast<std::size_t>(own.world_size()));
  own.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  std::vector<NamedValue> values;
  for (const engine::UnitSpec& unit : specs_) {
    if (unit.communicator == number) values.push_back({"unit " + unit.name, parameters_text(unit, true)});
  }
  BALLAST_CHECK(!values.empty());
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].world != world) {
      throw UsageError("the communicator of " + values.front().name + ": its rank " + std::to_string(i) +
                       " belongs to another engine's world than its rank " + std::to_string(own.rank()) +
                       "; a unit's ranks are among those of EngineEnvironment::communicator");
    }
    for (std::size_t k = 0; k < i; ++k) {
      if (all[i].rank == all[k].rank) {
        throw UsageError("the communicator of " + values.front().name + " has rank " + std::to_string(all[i].rank) +
                         " of the engine twice");
      }
    }
  }
  try {
    check_agreement(own, values);
  } catch (const CommunicationError& error) {
    throw CommunicationError("the communicator of " + values.front().name + ": " + error.what());
  }
  return static_cast<std::uint32_t>(all.front().rank);
}

// All of a unit's parameters that plans and numbers follow from.
std::string EngineImplementation::parameters_text(const engine::UnitSpec& unit, bool names) {
  std::string text;
  for (const ParameterSpec& parameter : unit.parameters) {
    if (names) text += parameter.name + " ";
    text += "(";
    for (const std::int64_t dimension : parameter.shape) text += std::to_string(dimension) + " ";
    text += "group " + std::to_string(parameter.options.group);
    if (parameter.options.dtype) text += ", dtype " + std::string(to_string(*parameter.options.dtype));
    if (!parameter.options.in_norm) text += ", not in the norm";
    text += parameter.options.trainable ? ") " : ", frozen) ";
  }
  return text;
}

}  // namespace ballast
