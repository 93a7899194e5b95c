// Every order of completions of a small plan, by backtracking over a set of seen states.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/simulate/model_trainer.h>

#include <cstdint>
#include <string>

namespace ballast::simulate {

struct Exploration {
  std::uint64_t states = 0;  // different ones
  std::uint64_t transitions = 0;
  std::uint64_t ends = 0;     // times the end was reached
  std::uint32_t reliefs = 0;  // most on one path
  bool complete = false;      // all states were seen; false: states_max was reached, or a failure ended it
  std::string failure;        // empty: none; otherwise what, and the state with the order that led there
};

struct ExplorerOptions {
  std::uint64_t states_max = 10'000'000;
  bool allow_relief = false;       // otherwise taking back what is expected where everything stands still is a stall
  std::uint32_t disturbances = 0;  // so many times on each path what is expected is taken back, at every possible point
};

// Stops at the first failure: a stall, a broken invariant, a wrong byte, a chunk not updated exactly once.
Exploration explore(const Plan& plan, const ExplorerOptions& options = {});

}  // namespace ballast::simulate
