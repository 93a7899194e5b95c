// What passes between ranks in the model: who has begun which collective with what in hand, and who has come to which
// agreement (the small blocking exchanges of finish_backward). Copyable. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/simulate/model_world.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace ballast::simulate {

class Exchange {
 public:
  // mirrored: only the first rank is there, and the others are taken to do the same at once.
  // unit_ranks: as in Plan.
  explicit Exchange(Index ranks, bool mirrored = false, std::vector<Index> unit_ranks = {})
      : mirrored_(mirrored), ranks_(ranks), unit_ranks_(std::move(unit_ranks)), parties_(ranks) {}

  // A rank begins its next collective of the task's kind. Returns what differs from another rank's; empty: nothing.
  // From here on the bytes that a rank brings are on their way: a rank may end it once all that share the unit have
  // begun.
  std::string start(Index rank, const schedule::Action& action, std::vector<Content> brought);
  bool may_finish(Index rank, schedule::Task task) const;
  // What every rank that shares the unit brought, from this rank on upward.
  void collect(Index rank, schedule::Task task, std::vector<const std::vector<Content>*>& brought) const;
  void finish(Index rank, schedule::Task task);

  void arrive(Index rank) { ++parties_[rank].arrived; }
  bool may_pass(Index rank) const;
  void pass(Index rank) { ++parties_[rank].passed; }

  // At the end: every collective that one rank began was begun by all. Empty: so it is.
  std::string unmatched() const;
  // A rank's part, relative to the others: equal for states that behave alike.
  void serialize(Index rank, std::vector<std::uint32_t>& out) const;
  std::uint64_t collectives(schedule::Task task) const { return parties_[0].kinds[kind_of(task)].started; }

 private:
  struct Record {
    Index unit = kNone;
    std::vector<Content> brought;
  };
  struct Kind {
    std::uint64_t started = 0, finished = 0;
    std::vector<Record> records;  // begun, and not yet ended by all ranks
  };
  struct Party {
    std::array<Kind, 2> kinds;  // gathers, reductions
    std::uint32_t arrived = 0, passed = 0;
  };
  static std::size_t kind_of(schedule::Task task) { return task == schedule::Task::gather ? 0 : 1; }
  std::uint64_t ended_by_all(std::size_t kind) const;
  const Record& under_way(Index rank, std::size_t kind) const;
  Index ranks_of(Index unit) const { return unit_ranks_.empty() ? ranks_ : unit_ranks_[unit]; }

  bool mirrored_ = false;
  Index ranks_ = 1;
  std::vector<Index> unit_ranks_;
  std::vector<Party> parties_;
};

}  // namespace ballast::simulate
