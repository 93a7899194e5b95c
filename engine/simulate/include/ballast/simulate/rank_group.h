// All ranks of a run with what passes between them. Copyable, so that an explorer can go back.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/simulate/rank_trainer.h>

#include <cstdint>
#include <string>
#include <vector>

namespace ballast::simulate {

class RankGroup {
 public:
  // The plan must outlive it.
  RankGroup(const Plan& plan, const RankOptions& options);

  Index ranks() const { return static_cast<Index>(trainers_.size()); }
  RankTrainer& rank(Index r) { return trainers_[r]; }
  const RankTrainer& rank(Index r) const { return trainers_[r]; }
  Exchange& exchange() { return exchange_; }
  const Exchange& exchange() const { return exchange_; }
  bool done() const;
  std::string error() const;  // of the first rank that has one
  // To be called at the end: every chunk of every rank updated as decided, every collective matched.
  std::string finish();
  std::string describe() const;
  void check_always(bool on);

 private:
  Exchange exchange_;
  std::vector<RankTrainer> trainers_;
};

struct RankExploration {
  std::uint64_t states = 0;
  std::uint64_t transitions = 0;
  std::uint64_t ends = 0;
  std::uint64_t collectives = 0;  // of one run
  bool complete = false;
  std::string failure;                     // empty: none; otherwise what, and the state with the order that led there
  std::vector<std::uint64_t> rank_states;  // where asked for: hashes of what each rank was seen in, sorted
};

struct RankExplorerOptions {
  RankOptions ranks;
  std::uint64_t states_max = 10'000'000;
  // Orders that differ only in how events of different ranks lie between each other lead every rank through the same
  // states. Reduced: of those only one is followed (persistent sets: a rank whose events no other rank can add to goes
  // first), and states in which two ranks have changed places are one. Otherwise all are.
  bool reduced = true;
  bool keep_rank_states = false;
};

// Every order in which what the ranks do can end. Stops at the first failure: a stall, collectives in different orders,
// a broken invariant, a wrong byte, a chunk not updated exactly once.
RankExploration explore_ranks(const Plan& plan, const RankExplorerOptions& options = {});

struct RankRun {
  std::string failure;
  std::uint64_t tasks = 0, collectives = 0, deviations = 0;
};

// One order drawn from a seed: some ranks, tasks and trainers are slower than others.
RankRun run_ranks(const Plan& plan, std::uint64_t seed);

}  // namespace ballast::simulate
