// One rank of several: a trainer, the part of the engine between it and the scheduler, and the scheduler, as pure
// logic. It follows the engine's rules for several ranks: what is appended ahead is counted, a full table is waited
// for, nothing that is appended depends on what has ended. The explorer, random runs and the simulator drive it: they
// choose what happens next. Copyable. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/simulate/exchange.h>
#include <ballast/simulate/model_world.h>
#include <ballast/simulate/plan.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace ballast::simulate {

// What happens by itself, and what is an event that may come late.
struct RankOptions {
  bool free_trainer = false;  // every call of the trainer's host, and every end of a lease on its device, is an event
  bool free_starts = false;   // so is the engine's asking for what may start
};

class RankTrainer {
 public:
  enum class EventKind : std::uint8_t { task, compute, agreement, host, device, start };
  struct Event {
    EventKind kind = EventKind::task;
    std::size_t index = 0;  // task: in flight
  };

  // The plan must outlive it. begin() first.
  RankTrainer(const Plan& plan, Index rank, const RankOptions& options);
  void begin(Exchange& exchange) { advance(exchange); }

  // What may happen now. host, device and start may turn out to do nothing: see happen().
  void events(const Exchange& exchange, std::vector<Event>& out) const;
  // Waits for something that another rank has not done yet: its next steps may bring new events here.
  bool waits_for_others(const Exchange& exchange) const;
  // False: nothing has come of it.
  bool happen(const Event& event, Exchange& exchange);
  bool done() const { return closed_ && device_at_ == plan_->program.size() && scheduler_.idle(); }
  const std::string& error() const { return world_.error(); }
  void finish() { world_.finish_run(scheduler_); }

  const schedule::Action& task(std::size_t in_flight) const { return world_.in_flight()[in_flight].action; }
  std::size_t tasks_in_flight() const { return world_.in_flight().size(); }
  bool computing() const { return computing_; }
  Index computing_unit() const { return computing_unit_; }
  const Operation& computing_operation() const { return plan_->program[device_at_]; }
  bool agreeing() const { return agreeing_; }
  std::size_t decisions() const { return decisions_; }
  std::uint64_t tasks_started() const { return tasks_started_; }
  std::uint64_t deviations() const { return deviations_; }
  const schedule::Scheduler& scheduler() const { return scheduler_; }
  void check_always(bool on) { check_always_ = on; }
  void serialize(std::vector<std::uint32_t>& out) const;
  std::string describe() const;
  std::string name(const Event& event) const;

 private:
  struct Handle {
    Index entry = kNone;
    Index unit = kNone;
    bool gradient = false;
    std::uint64_t turn = 0;  // of the entry, in the order of appending
  };
  struct Expected {
    Index entry = kNone;
    Index pass = 0;  // serial
    std::size_t access = 0;
  };
  struct Opening {  // of the call that is under way
    std::uint64_t offset = 0;
    Index trace = kNone;
    std::size_t access = 0;
  };

  void advance(Exchange& exchange);
  bool host_step(Exchange& exchange);
  bool call(const Operation& operation, Exchange& exchange);
  bool open(const Operation& operation);
  bool choose_opening(const Operation& operation, Index& entry);
  void opened(const Operation& operation, Index entry);
  bool decide(const Operation& operation, Exchange& exchange);
  bool settle();
  bool force_updates(Index unit);
  void begin_pass(bool evaluation);
  void end_pass();
  bool top_up();
  Index append(const Operation& what, std::uint64_t offset, Index trace, std::size_t access, bool next_step,
               bool last_pass, bool leased);
  bool find_place(const Operation& operation, std::uint64_t& offset);
  void drop_expected();
  void note_update_queued(const Operation& operation);
  void forget_update_queued(Index unit);
  void sync_expected();
  bool last_pass_of_step() const { return in_step_ && in_pass_ && !evaluating_ && covered_ + 1 == passes_; }
  bool commits_pending() const;
  bool device_gates();
  bool device_step();
  bool start(Exchange& exchange);
  void check_readers(const schedule::Action& gather);

  const Plan* plan_;
  Index rank_ = 0;
  RankOptions options_;
  schedule::Scheduler scheduler_;
  ModelWorld world_;
  std::array<std::shared_ptr<const PassTrace>, 2> traces_;  // training, evaluation; never changed, so copies share them
  std::vector<Handle> handles_;
  std::vector<Index> open_handles_;          // opened on the host, not yet ended on the device
  std::vector<Index> device_open_;           // ... that the device has come to
  std::vector<std::uint8_t> opened_;         // per unit: its parameters, since the last decision
  std::vector<std::uint8_t> update_queued_;  // per unit: eager, an open lease has queued its update
  std::vector<std::uint64_t> entry_turns_;   // per entry of the scheduler
  std::vector<Expected> expected_;

  std::size_t host_at_ = 0, device_at_ = 0;  // next operations
  std::size_t pass_begin_ = 0;
  Index stage_ = 0, unit_at_ = 0;  // within the host's call
  Opening opening_;
  Index trace_ = kNone, next_trace_ = kNone;
  Index serial_ = 0, ahead_pass_ = 1;
  std::size_t position_ = 0, ahead_access_ = 0;
  Index passes_ = 1, covered_ = 0;
  Index queued_chunks_ = 0;  // of units with update_queued_
  bool in_step_ = false, in_pass_ = false, evaluating_ = false, following_ = false;
  bool topping_up_ = false, closed_ = false, agreeing_ = false, agreed_ = false;
  bool computing_ = false, compute_reads_ = false, compute_writes_ = false;
  bool progress_ = false;
  Index computing_unit_ = kNone;
  std::uint64_t compute_parameters_ = 0, compute_gradients_ = 0;
  std::uint64_t cancellations_ = 0, turn_ = 0;
  std::uint64_t tasks_started_ = 0, deviations_ = 0;
  std::size_t decisions_ = 0;
  bool check_always_ = true;
};

}  // namespace ballast::simulate
