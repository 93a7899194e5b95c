// A scheduler and a world that answers in the order that a test wants. Every answer is followed by Scheduler::check().
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/schedule/scheduler.h>
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

namespace ballast::schedule {

// Tasks as text ("read 0", "copy in 1"), to compare whole sequences.
inline std::string name(const Action& action) {
  static const char* const kNames[] = {"read",       "write",  "copy in", "copy out",     "update",
                                       "accumulate", "gather", "reduce",  "read gradient"};
  return std::string(kNames[static_cast<int>(action.task)]) + ' ' + std::to_string(action.chunk);
}

using Names = std::vector<std::string>;

class World {
 public:
  // Units of equal shape.
  World(Index units, Index chunks, Limits limits = {}, Tier parameters = Tier::nvme, Tier optimizer = Tier::nvme,
        Tier gradients = Tier::host, bool stored = true) {
    std::vector<Chunk> all;
    std::vector<Unit> list;
    for (Index u = 0; u < units; ++u) {
      Unit unit;
      unit.first_chunk = u * chunks;
      unit.chunk_count = chunks;
      unit.parameter_bytes = parameters == Tier::device ? 0 : 10;
      unit.gradient_bytes = 10;
      unit.stored_gradients = stored;
      list.push_back(unit);
      for (Index c = 0; c < chunks; ++c) {
        Chunk chunk;
        chunk.unit = u;
        chunk.parameters = parameters;
        chunk.optimizer = optimizer;
        chunk.gradients = gradients;
        all.push_back(chunk);
      }
    }
    scheduler = std::make_unique<Scheduler>(all, list, limits);
    chunks_ = chunks;
  }

  // Starts what may start, and says what that is.
  Names start() {
    std::array<Action, 32> actions;
    const std::size_t count = scheduler->next(actions);
    Names names;
    for (std::size_t i = 0; i < count; ++i) {
      names.push_back(name(actions[i]));
      flying.push_back(actions[i]);
    }
    verify();
    return names;
  }
  void finish(const std::string& which) {
    for (std::size_t i = 0; i < flying.size(); ++i) {
      if (name(flying[i]) != which) continue;
      const Action action = flying[i];
      flying.erase(flying.begin() + static_cast<std::ptrdiff_t>(i));
      scheduler->finished(action);
      verify();
      return;
    }
    ADD_FAILURE() << which << " is not in flight\n" << scheduler->describe();
  }
  const Action& flight(const std::string& which) {
    for (const Action& action : flying) {
      if (name(action) == which) return action;
    }
    ADD_FAILURE() << which << " is not in flight";
    return flying.front();
  }
  // Until nothing is in flight; every task that began, in order.
  Names run() {
    Names all = start();
    while (!flying.empty()) {
      finish(name(flying.front()));
      for (std::string& n : start()) all.push_back(std::move(n));
    }
    return all;
  }
  void commit(Index entry, bool last, bool eager, std::vector<int> contributes = {}) {
    std::array<bool, 8> flags;
    for (Index i = 0; i < chunks_; ++i) flags[i] = contributes.empty() || contributes[i] != 0;
    scheduler->commit_gradients(entry, {flags.data(), chunks_}, last, eager);
    if (eager && last) {
      EXPECT_TRUE(scheduler->append_eager_updates(units_[entry]));
    }
    verify();
  }
  // Gradients of a unit, from opening to the last byte accumulated.
  void contribute(Index unit, bool last, bool eager = false, std::vector<int> contributes = {}) {
    const Index g = scheduler->append_gradients(unit, 100 + 10 * unit, false, true);
    units_[g] = unit;
    commit(g, last, eager, contributes);
    run();
  }
  Index gradients(Index unit, std::uint64_t offset, bool eager_updates, bool leased) {
    const Index g = scheduler->append_gradients(unit, offset, eager_updates, leased);
    units_[g] = unit;
    verify();
    return g;
  }
  Index parameters(Index unit, std::uint64_t offset, Form form, bool leased) {
    const Index p = scheduler->append_parameters(unit, offset, form, leased);
    verify();
    return p;
  }
  void release(Index entry) {
    scheduler->release(entry);
    verify();
  }
  void verify() {
    const std::string broken = scheduler->check();
    EXPECT_EQ(broken, "") << scheduler->describe();
  }

  std::unique_ptr<Scheduler> scheduler;
  std::vector<Action> flying;

 private:
  Index chunks_ = 1;
  std::array<Index, 128> units_{};
};

inline Limits small(Index fetch, Index update, Index gradient) {
  Limits l;
  l.fetch_slots = fetch;
  l.update_slots = update;
  l.gradient_slots = gradient;
  return l;
}

}  // namespace ballast::schedule
