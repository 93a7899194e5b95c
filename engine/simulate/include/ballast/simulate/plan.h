// A training run as the model trainer drives it: units and chunks, limits, and the trainer's program. Hand-made, or
// drawn from a seed. Bytes are small (one cell for each chunk on the device), so that the model can hold them all.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/schedule/device_map.h>
#include <ballast/schedule/scheduler.h>

#include <cstdint>
#include <string>
#include <vector>

namespace ballast::simulate {

using schedule::Index;
using schedule::kNone;

enum class Timing : std::uint8_t { just_in_time, eager, after_backward };

enum class Verb : std::uint8_t {
  begin_step,  // count: its passes
  begin_pass,  // flag: evaluation
  end_pass,
  open_parameters,  // unit, handle
  open_gradients,   // unit, handle
  compute,          // waits for everything open of the unit; reads its parameters, writes its gradients
  commit,           // handle; mask: chunks that contribute; flag: the unit's last contribution of the step
  give_up,          // handle of gradients: released without a commit
  release,          // handle of parameters
  decide,           // flag: update (otherwise discard)
  settle,           // runs all pending updates
  take_back,        // several ranks: what is expected is taken back, as when values are read
};

// One call of the trainer. Handles name openings, each its own.
struct Operation {
  Verb verb = Verb::compute;
  Index unit = kNone;
  Index handle = kNone;
  Index count = 0;
  std::uint32_t mask = 0xFFFFFFFFu;
  bool flag = false;
  bool agrees = false;         // decide, several ranks: also where it discards, the ranks agree first
  std::uint64_t work_ns = 0;   // compute, where Plan::timed
  Index contribution = kNone;  // commit, one rank of several: which of Plan::contributions; kNone: all chunks
};

// One use of device memory in a pass, as the trace records it. Times are indices of the pass's operations.
struct Access {
  Index unit = 0;
  bool gradient = false;
  bool partial = false;   // gradient: more of the unit's contributions follow in the pass
  bool given_up = false;  // gradient: not committed
  std::uint32_t open_at = 0, close_at = 0;
};

struct Plan {
  Index ranks = 1;  // each stores its own chunks; all ranks have the same plan, tiers included
  std::vector<schedule::Chunk> chunks;
  std::vector<schedule::Unit> units;
  // Per unit: how many ranks share it, those of equal rank / number (units with communicators of their own). Empty: all
  // ranks every one.
  std::vector<Index> unit_ranks;
  schedule::Limits limits;
  std::uint64_t slab_bytes = 0;
  Timing timing = Timing::just_in_time;
  Index run_ahead = 0;           // calls that the trainer's host may be ahead of its device work
  bool look_ahead = true;        // false: everything on demand
  bool timed = false;            // each compute takes its own work_ns; otherwise the hardware model tells
  std::vector<Access> expected;  // the pass that commit() plans for
  Index expected_passes = 1;     // of each step
  std::vector<Operation> program;
  std::vector<Index> handles;  // the unit of each
  // Chunks of a unit that have a gradient in a commit; what some commits name.
  std::vector<std::vector<std::uint8_t>> contributions;
  std::string text;  // what it is, for messages
};

// Shards of a unit's parameters and gradients on the device: one for each rank that shares it, where it is partitioned.
inline Index shards_of(const Plan& plan, Index unit) {
  return !plan.units[unit].gathered ? 1 : plan.unit_ranks.empty() ? plan.ranks : plan.unit_ranks[unit];
}
// Gives a unit to groups of so many ranks (which divide all), and its openings their sizes.
void share_among(Plan& plan, Index unit, Index ranks);

// The trace of a pass: program[begin, end) from after begin_pass to before end_pass.
std::vector<Access> record_pass(const std::vector<Operation>& program, std::size_t begin, std::size_t end);

std::vector<schedule::Opening> openings_of(const Plan& plan, const std::vector<Access>& pass);

// The smallest slab in which a pass's openings fit.
std::uint64_t smallest_slab(const Plan& plan, const std::vector<Access>& pass);

// A recorded pass, compiled: places, and how each opening treats updates.
struct PassTrace {
  std::vector<Access> accesses;
  std::vector<std::uint64_t> offsets;
  // Per access: the unit's first parameters of the pass; eager: states are read with these parameters; eager: this
  // gradient queues the update itself.
  std::vector<std::uint8_t> first_parameters, carries_update, queues_update;
  std::size_t forward_end = 0;  // the first access that may not be appended before the step is decided
  bool known = false;           // recorded, and fits
};
PassTrace compile_pass(const Plan& plan, std::vector<Access> accesses);
bool same_accesses(const std::vector<Access>& a, const std::vector<Access>& b);

// Writes programs: the usual loops, from which plans are put together.
class ProgramWriter {
 public:
  explicit ProgramWriter(Plan& plan) : plan_(plan) {}

  Index open_parameters(Index unit);
  Index open_gradients(Index unit);
  void compute(Index unit) { add({Verb::compute, unit}); }
  void release(Index handle);
  void commit(Index handle, bool last, std::uint32_t mask = 0xFFFFFFFFu);
  void give_up(Index handle);
  void begin_step(Index passes) { add({Verb::begin_step, kNone, kNone, passes}); }
  void begin_pass(bool evaluation) { add({Verb::begin_pass, kNone, kNone, 0, 0, evaluation}); }
  void end_pass() { add({Verb::end_pass}); }
  void decide(bool update, bool agrees = false) {
    Operation operation{Verb::decide, kNone, kNone, 0, 0, update};
    operation.agrees = agrees;
    add(operation);
  }
  void settle() { add({Verb::settle}); }
  void take_back() { add({Verb::take_back}); }

  void forward(Index unit);
  // Parameters, gradients, maths, commit, release. mask: chunks that contribute.
  void backward(Index unit, bool last, std::uint32_t mask = 0xFFFFFFFFu);
  // Units in order, then reversed.
  void training_pass(bool last, std::uint32_t mask = 0xFFFFFFFFu);
  void evaluation_pass();
  void step(Index passes, bool update, std::uint32_t mask = 0xFFFFFFFFu);

 private:
  void add(Operation operation) { plan_.program.push_back(operation); }
  Plan& plan_;
};

// Units of equal shape. tiers of parameters, optimizer states and gradients.
struct Shape {
  Index units = 2;
  Index chunks_per_unit = 1;
  schedule::Tier parameters = schedule::Tier::nvme;
  schedule::Tier optimizer = schedule::Tier::nvme;
  schedule::Tier gradients = schedule::Tier::host;
  bool stored_gradients = true;
  Index ranks = 1;
  bool whole = false;  // several ranks: stage 0, every rank has all chunks and gradients are reduced to all
};
Plan make_plan(const Shape& shape, Timing timing);
// Sets plan.expected and plan.slab_bytes from the default pass (forward, then backward in reverse).
void expect_default_pass(Plan& plan, Index passes);

}  // namespace ballast::simulate
