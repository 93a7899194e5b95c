// A trainer and the part of the engine that stands between it and the scheduler, as pure logic: runs a plan's program,
// looks ahead along the recorded trace, serves deviations on demand. The explorer and the simulator drive it: they
// choose which event completes next. Copyable, so that an explorer can go back. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/simulate/model_world.h>
#include <ballast/simulate/plan.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace ballast::simulate {

class ModelTrainer {
 public:
  // The plan must outlive it.
  explicit ModelTrainer(const Plan& plan);

  // Events that may complete now: tasks in flight, in the order of their starts, then the trainer's maths.
  std::size_t events() const { return world_.in_flight().size() + (computing_ ? 1 : 0); }
  // Completes one of them and lets everything that follows from it happen.
  void complete(std::size_t event);
  // Takes back what is expected, as an engine may at any time (the trace was repaired, memory is wanted elsewhere).
  void disturb();
  bool done() const { return closed_ && scheduler_.idle(); }
  // Neither done nor able to go on. (A trainer that stands still first takes back what is expected: see reliefs.)
  bool stalled() const { return !done() && events() == 0; }
  // The first thing that was wrong; empty: nothing.
  const std::string& error() const { return world_.error(); }
  // To be called at the end.
  void finish() { world_.finish_run(scheduler_); }

  // Task of an event (an index below events()); false for the trainer's maths.
  bool task_of(std::size_t event, schedule::Action& action) const;
  Index computing_unit() const { return computing_unit_; }
  // Tasks started so far, and how often everything stood still until what was expected was taken back.
  std::uint64_t tasks_started() const { return tasks_started_; }
  std::uint32_t reliefs() const { return reliefs_; }
  std::uint32_t deviations() const { return deviations_; }
  std::uint32_t disturbances() const { return disturbances_; }
  std::size_t decisions() const { return decisions_; }
  const schedule::Scheduler& scheduler() const { return scheduler_; }
  void check_always(bool on) { check_always_ = on; }

  void serialize(std::vector<std::uint32_t>& out) const;
  std::string describe() const;

 private:
  struct Handle {
    Index entry = kNone;
    Index unit = kNone;
    bool gradient = false;
  };
  struct Expected {
    Index entry = kNone;
    Index pass = 0;  // passes after the running one
    Index access = 0;
  };

  void pump();
  bool host_step();
  bool device_step();
  bool look_ahead();
  bool open(const Operation& operation);
  Index append(const PassTrace& trace, Index access, Index pass, bool leased);
  Index append_on_demand(const Operation& operation);
  bool find_place(Index unit, bool gradient, std::uint64_t bytes, std::uint64_t& offset) const;
  bool host_barrier(const Operation& operation);
  void begin_pass(bool evaluation);
  void end_pass();
  void drop_expected();
  void note_cancellations();
  void note_deviation();
  bool queue_updates();
  bool ready_to_compute(Index unit, Index& parameters, Index& gradients) const;
  const PassTrace& running_trace() const { return traces_[evaluating_ ? 1 : 0]; }

  const Plan* plan_;
  schedule::Scheduler scheduler_;
  ModelWorld world_;
  std::array<PassTrace, 2> traces_;  // training, evaluation
  std::vector<Handle> handles_;      // by the program's numbers
  std::vector<Index> device_open_;   // handles
  std::vector<Expected> expected_;

  std::size_t host_at_ = 0, device_at_ = 0;  // next operations
  std::size_t pass_begin_ = 0;               // of the running pass, in the program
  bool in_pass_ = false, evaluating_ = false, deviated_ = false;
  bool in_step_ = false;
  Index pass_ = kNone;                       // of the step; kNone: between steps
  Index passes_ = 1;                         // of the step, or of the last one
  Index cursor_ = 0;                         // accesses of the running pass that the host has opened
  Index ahead_pass_ = 0, ahead_access_ = 0;  // what is appended next
  Index update_unit_ = kNone;                // after_backward, settle: units before it have their updates queued
  bool settling_ = false, closed_ = false;
  bool computing_ = false, compute_reads_ = false, compute_writes_ = false;
  Index computing_unit_ = kNone;
  std::uint64_t compute_parameters_ = 0, compute_gradients_ = 0;
  std::uint64_t cancellations_ = 0;

  std::uint64_t tasks_started_ = 0;
  std::uint32_t reliefs_ = 0, deviations_ = 0, decisions_ = 0, disturbances_ = 0;
  bool check_always_ = true;
};

}  // namespace ballast::simulate
