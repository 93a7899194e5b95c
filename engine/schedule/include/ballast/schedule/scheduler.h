// SPDX-License-Identifier: Apache-2.0
// Scheduler: decides what to do next, and nothing else. A state machine that is told what happened (the trainer opened,
// released or committed something; a task ended) and asked which tasks may start. No threads, clock, I/O, floating
// point or allocation after construction; ties go to the earlier place in program order. The executor drives it on real
// hardware, the simulator on a virtual clock, the explorer through every order of completions.
//
// The words. An *entry* is one use of device memory in program order: a unit's parameters from their arrival to their
// release, or a unit's gradient scratch from its opening until the last byte has left. An entry owns a range of the
// device slab; it may be written once no earlier entry that overlaps it is alive. A *job* carries one chunk through its
// tasks:
//   fetch     [slot] read parameters, copy in
//   update    [slot] read states, (copy in first: eager), wait for the gate, (read the gradient), update, (copy in),
//             write back
//   gradient  [slot] copy out, (read the sum so far), accumulate, (write the sum)
// What stands in parentheses about gradients is for those that are stored on NVMe.
// Program order is the order of appending. Slots of one kind are given out strictly in that order, so that a later job
// never takes what an earlier one still waits for; jobs on one chunk run one after another (gradients in a queue of
// their own). What an earlier job waits for is therefore never held by a later one, except where the trainer leaves
// the expected order: then cancel_expected() first gives everything back that no trainer holds.
//
// Several ranks: every rank runs a scheduler of its own over the chunks of its shard, and a unit's entries bring
// *collectives*: a parameter entry, once its chunks have arrived, gathers the other ranks' shards; a committed gradient
// entry is reduced before its jobs read it. Gathers happen in the order of appending, reductions in the order in which
// the trainer asked for the commits; the two kinds are independent of each other. Which entries gather follows from
// what the trainer did and from the order of appending alone, never from when something ended; so ranks whose trainers
// do the same, and whose callers append the same entries at the same points, issue the same collectives in the same
// order. cancel_expected() keeps that: an expected entry that some rank may have begun to gather is carried through.
// With eager updates a unit must not be read again between its last commit and decide(); what of them nobody has
// claimed is asked for with append_updates() after decide().
//
// An update is *claimed* by the job that will do it, and by one only. A job queued ahead of its decision or gradient
// *waits for the trainer*; a chunk has at most one of those, and no request of the trainer is ever queued behind
// it: lease() turns it back into a fetch, or drops it, first.
#pragma once

#include <ballast/schedule/range_map.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace ballast::schedule {

using Index = std::uint32_t;
constexpr Index kNone = 0xFFFFFFFFu;

enum class Tier : std::uint8_t { device, host, nvme };

struct Chunk {
  Index unit = 0;
  Tier parameters = Tier::nvme;
  Tier optimizer = Tier::nvme;
  Tier gradients = Tier::host;
  bool trainable = true;
  // Bytes that its tasks move, for cost models; no decision depends on them.
  std::uint64_t parameter_bytes = 0;
  std::uint64_t optimizer_bytes = 0;
  std::uint64_t gradient_bytes = 0;
};

struct Unit {
  Index first_chunk = 0;
  Index chunk_count = 0;
  std::uint64_t parameter_bytes = 0;  // on the device; 0 where its parameters live there for good
  std::uint64_t gradient_bytes = 0;   // of scratch on the device
  bool stored_gradients = true;       // a place of their own in their tier; false: slots, consumed at once
  bool gathered = false;              // parameters come from all ranks
  bool reduced = false;               // gradients go to all ranks; then they are stored
};

struct Limits {
  Index fetch_slots = 2;
  Index update_slots = 2;
  Index gradient_slots = 1;
  Index reads = 8;  // lane depths, in tasks
  Index writes = 8;
  Index copies_in = 4;
  Index copies_out = 4;
  Index cpu_tasks = 2;
  Index entries = 64;  // alive at once at most; append is refused beyond
  Index jobs = 1024;   // at least 5 for each chunk of the units that the trainer holds at once
};

// read_gradient: an update's; a gradient job reads and writes its own with read and write.
enum class Task : std::uint8_t { read, write, copy_in, copy_out, update, accumulate, gather, reduce, read_gradient };
constexpr int kTaskCount = 9;
enum class SlotKind : std::uint8_t { none, fetch, update, gradient };
enum class JobKind : std::uint8_t { fetch, update, gradient };

// What to start now. Exactly one finished() per action.
struct Action {
  Task task = Task::read;
  JobKind job_kind = JobKind::fetch;
  Index job = kNone;    // identifies the job in finished()
  Index entry = kNone;  // gather, reduce: the entry instead; they have no job and no chunk
  Index chunk = kNone;
  Index unit = kNone;
  SlotKind slot_kind = SlotKind::none;
  Index slot = kNone;               // where the bytes are on the host; kNone: the chunk's own place in its tier
  Index gradient_slot = kNone;      // update: where the gradient is; kNone: in the unit's store, or with the states
  std::uint64_t device_offset = 0;  // of the entry (copies; accumulate from the device)
  bool first = false;               // gradient: overwrite rather than add
  bool last = false;                // gradient: the unit's last contribution of this step (sums are wanted)
  bool urgent = false;              // reads: somebody waits; writes: a job waits for the slot
};

// How an entry of parameters treats its unit's chunks. Chunks whose update is due are updated first in any form.
enum class Form : std::uint8_t {
  fetch,
  update_expected,  // just in time, ahead of the decision: states are read now, the update waits for decide()
  update_after,     // eager: states are read with the parameters and updated when the gradient has come
};

class Scheduler {
 public:
  Scheduler(std::vector<Chunk> chunks, std::vector<Unit> units, const Limits& limits);

  // --- what the engine expects and what the trainer does (in this order per entry: append, lease, release) ---------

  // Appends an entry for a unit's parameters at a device offset. Returns its id, or kNone (try again later) where the
  // tables are full, or where it is expected with an update while an earlier update of the unit still waits for the
  // trainer. `leased`: the trainer asks for it now (nothing may be expected then); otherwise lease() follows, in the
  // order of appending. Ids are used again: watch cancellations().
  Index append_parameters(Index unit, std::uint64_t device_offset, Form form, bool leased);
  // Likewise for gradient scratch. eager_updates: also queue the unit's update jobs, to run when the gradient comes
  // (for units whose parameter entry did not carry them). Keeps room for the jobs of its commit.
  Index append_gradients(Index unit, std::uint64_t device_offset, bool eager_updates, bool leased);
  void lease(Index entry);
  bool leased(Index entry) const { return entries_[entry].leased; }
  // Parameters: all chunks have arrived. Gradients: the range may be written.
  bool ready(Index entry) const;
  // Parameters: the trainer's work no longer needs them. Gradients: given up without a commit.
  void release(Index entry);
  // Gradients: the scratch holds values now. contributes: per chunk of the unit, false where every parameter in it is
  // absent. last: the unit's last contribution of this step; eager: updates run as gradients arrive. Queues one
  // gradient job per contributing chunk; the entry ends when they have read it.
  void commit_gradients(Index entry, std::span<const bool> contributes, bool last, bool eager);
  // The trainer has asked for this gradient entry to be committed; commit_gradients() follows. Reductions happen in the
  // order of these calls.
  void note_commit_requested(Index entry);
  // Ends what is expected and not leased: the entries, their jobs as soon as nothing of them is in flight. An update
  // that has begun on the CPU, or whose gradient is committed, is carried through, and so is a gather that some rank
  // may have begun. Updates that wait for the trainer are taken back from leased entries too (append_eager_updates()
  // queues them again).
  void cancel_expected();
  // Grows whenever expected entries are cancelled, by cancel_expected() or from within decide(), append_updates() or
  // append_eager_updates(): ids of expected entries remembered from before are void then.
  std::uint64_t cancellations() const { return cancellations_; }

  // The step's gradients are decided: updates of contributing chunks become due (true), or are dropped. No gradient may
  // be outstanding.
  void decide(bool update);
  // Queues jobs for the unit's due updates that no job will do yet (updates without an entry); cancels what is expected
  // where it would bring stale parameters or hold these updates up. Returns false where the table is full.
  bool append_updates(Index unit);
  // Likewise after an eager commit that was the unit's last, for updates that were not queued ahead: to be called after
  // each such commit. Right after it there is room.
  bool append_eager_updates(Index unit);

  // --- what the world answers ---------------------------------------------------------------------------------------

  // Appends what may start now to `out` (up to out.size()); returns how many.
  std::size_t next(std::span<Action> out);
  void finished(const Action& action);

  // --- questions ----------------------------------------------------------------------------------------------------

  // No job and no collective is left.
  bool idle() const { return jobs_alive_ == 0 && collectives_over(); }
  bool collectives_over() const { return gathers_.count == 0 && reductions_.count == 0; }
  bool quiet() const { return in_flight_ == 0; }  // no task is in flight
  bool update_due(Index chunk) const { return chunk_states_[chunk].due || chunk_states_[chunk].owed; }
  bool unit_update_due(Index unit) const;             // decided (or committed eagerly) and not yet done
  Index updates_due() const { return updates_due_; }  // of how many chunks
  // Every update that is due has a job that runs without anything more being asked for: queued by itself or with an
  // entry that is leased. Otherwise only an expected entry asks for it, or nothing: cancel_expected(),
  // append_updates().
  bool unit_updates_coming(Index unit) const;
  bool unit_busy(Index unit) const;  // any job of the unit is alive
  bool gradients_outstanding() const { return gradient_jobs_ != 0 || reductions_.count != 0; }
  // The first live entry that overlaps a range, other than `except`; kNone: none. With leased_only, only entries whose
  // release the trainer has not asked for yet.
  Index overlapping(std::uint64_t offset, std::uint64_t bytes, Index except, bool leased_only) const;
  void note_release_requested(Index entry);
  std::uint64_t device_offset(Index entry) const { return entries_[entry].offset; }
  std::uint64_t opening_bytes(Index unit, bool gradient) const {
    return gradient ? units_[unit].gradient_bytes : units_[unit].parameter_bytes;
  }
  std::uint64_t entry_bytes(Index entry) const { return entries_[entry].bytes; }
  Index entry_unit(Index entry) const { return entries_[entry].unit; }
  bool entry_alive(Index entry) const { return entry < entries_.size() && entries_[entry].alive; }
  Index entries_alive() const { return entry_count_; }
  bool room_for(Index unit) const;  // tables can take an entry with its jobs
  bool expected(Index entry) const {
    return entry_alive(entry) && !entries_[entry].leased && !entries_[entry].cancelled;
  }
  std::uint64_t updates_done(Index chunk) const { return chunk_states_[chunk].updates; }
  // Where the unit's current parameters still lie on the device unchanged, so that an entry appended there now shares
  // them. Returns false where they do not, or where an update of them is due that no job will do yet.
  bool copy_offset(Index unit, std::uint64_t* offset) const;
  // The entry waits for no earlier entry to leave its range: it has it, or shares the bytes of one that has or will.
  bool range_assured(Index entry) const { return entries_[entry].range_free || entries_[entry].source != kNone; }

  // Verifies every invariant; returns an empty text or what is broken. For tests: linear in the state.
  std::string check() const;
  // The whole state as words, equal for states that behave alike (ids, slots and keys are reduced to ranks): for the
  // explorer. And as text for people.
  void serialize(std::vector<std::uint32_t>& out) const;
  // The slots that are in use and the jobs alive, in the order in which serialize() names them: slots of jobs first.
  void in_use(std::vector<std::pair<SlotKind, Index>>& slots, std::vector<Index>& jobs) const;
  std::string describe() const;

 private:
  enum class Phase : std::uint8_t { unneeded, waiting, ready, running, done };

  struct Job {
    JobKind kind = JobKind::fetch;
    bool alive = false;
    bool cancelled = false;         // ends once nothing of it is in flight
    bool slot_wanted = false;       // still waiting for its slot
    bool head = false;              // first of its chunk's queue
    bool gate_open = false;         // update: may run
    bool gate_on_gradient = false;  // eager: opened by the gradient; otherwise by decide()
    bool copy_first = false;        // copy in before the update (eager) or after it (just in time)
    bool first = false, last = false;
    Phase read = Phase::unneeded, copy = Phase::unneeded, cpu = Phase::unneeded, write = Phase::unneeded;
    Phase load = Phase::unneeded;  // update: of its gradient, after the states and once the gate is open
    SlotKind slot_kind = SlotKind::none;
    Index slot = kNone;
    Index chunk = kNone;
    Index entry = kNone;  // that waits for this chunk (gradient: the scratch it reads)
    Index next_same_chunk = kNone;
    Index previous_waiting = kNone, next_waiting = kNone;  // in the slot kind's queue
    Index previous_held = kNone, next_held = kNone;        // among those that wait for the trainer
    std::uint64_t owner_key = 0;                           // of the entry it was queued with; 0: none
    std::uint64_t key = 0;                                 // program order
  };

  struct Entry {
    bool alive = false;
    bool gradient = false;
    bool leased = false;
    bool release_requested = false;  // the trainer will not hold it up any more
    bool released = false;
    bool cancelled = false;
    bool committed = false;
    bool carried = false;         // cancelled, but for its gather
    bool expects_update = false;  // gathers what the next decision updates
    bool gathers_change = false;  // and without that the unit's parameters have changed since their last gather
    bool range_free = false;      // nothing earlier overlaps
    Phase collective = Phase::unneeded;
    Index unit = kNone;
    bool to_check = false;
    bool held = false;                               // leased, and its release not requested
    Index source = kNone;                            // an earlier live entry whose bytes this one uses
    Index dependents = 0;                            // entries whose source this is
    Index first_wait = kNone;                        // for earlier entries to leave its range
    Index first_waiter = kNone;                      // waits of later entries for this one
    Index missing = 0;                               // chunks not yet arrived (gradient: not yet read)
    Index in_flight = 0;                             // copies touching its range
    Index reserved_jobs = 0;                         // gradient: for its commit and the updates that follow
    Index previous = kNone, next = kNone;            // program order
    Index unit_previous = kNone, unit_next = kNone;  // ... among the unit's
    Index held_previous = kNone, held_next = kNone;  // ... among those held
    std::uint64_t offset = 0, bytes = 0;
    std::uint64_t key = 0;
    std::uint64_t waiter_key = 0;  // of the last entry that began to wait for this one
  };

  // An entry waits for an earlier one that had its range (a part of it) last. Entries beneath that one need no wait of
  // their own: it has waited for them itself, or hands its waits on.
  struct Wait {
    Index waiter = kNone, blocker = kNone;
    Index previous_of_waiter = kNone, next_of_waiter = kNone;
    Index previous_of_blocker = kNone, next_of_blocker = kNone;
  };

  struct ChunkState {
    Index queue_head = kNone, queue_tail = kNone;        // fetch and update jobs
    Index gradient_head = kNone, gradient_tail = kNone;  // gradient jobs
    Index update_job = kNone;                            // will do the update that is due or owed
    Index waiting_job = kNone;                           // the next update: waits for the trainer
    Index gradient_slot = kNone;                         // holds the gradient until the update has consumed it
    bool contributed = false;                            // has a gradient in the running step
    bool eager = false;                                  // ... whose update does not wait for decide()
    bool owed = false;                                   // last eager contribution committed, not yet updated
    bool gradient_here = false;                          // ... and it has arrived
    bool due = false;                                    // decided, not yet updated
    std::uint32_t updates = 0;
  };

  struct List {
    Index head = kNone, tail = kNone;
  };

  struct SlotPool {
    std::vector<Index> free;
    Index waiting_head = kNone, waiting_tail = kNone;
  };

  struct Lane {
    std::vector<std::pair<std::uint64_t, Index>> heap;  // (program order, job), smallest first
    std::vector<Index> place;                           // of each job in it
    Index depth = 1;
    Index in_flight = 0;
    void push(std::uint64_t key, Index job);
    void remove(Index at);

   private:
    void put(std::size_t at, const std::pair<std::uint64_t, Index>& item);
  };

  // Entries whose collectives are still to end, in the order in which all ranks do them; one at a time.
  struct Collectives {
    std::vector<Index> ring;
    Index head = 0, count = 0;
    Index at(Index i) const { return ring[(head + i) % ring.size()]; }
    void push(Index entry) { ring[(head + count++) % ring.size()] = entry; }
    void pop() {
      head = (head + 1) % static_cast<Index>(ring.size());
      --count;
    }
    void remove(Index entry);
  };

  // A unit's parameters that are still on the device, valid until something is written over them.
  struct Copy {
    bool here = false;
    Index entry = kNone;  // while alive
    std::uint64_t offset = 0, bytes = 0;
  };

  Index append_entry(Index unit, std::uint64_t offset, std::uint64_t bytes, bool gradient, bool leased);
  Index append_job(JobKind kind, Index chunk, Index entry, std::uint64_t key);
  void append_fetch(Index chunk, Index entry);
  void append_update(Index chunk, Index entry, bool copy_first, bool gate_on_gradient, std::uint64_t key);
  bool queue_updates(Index unit);
  void want_slot(Index job, SlotKind kind);
  void leave_slot_queue(Index job);
  bool serve_slots(SlotKind kind);
  void settle();
  void take_range(Index entry);
  void range_is_free(Index entry);
  void add_wait(Index waiter, Index blocker);
  void remove_wait(Index wait);
  void leave_range(Index entry);
  void paint_ranges();
  void hold(Index entry);
  void let_go(Index entry);
  void check_later(Index entry);
  void skip_update(Index job);
  void skip_waiting(Index unit, Index entry);
  void order_updates(Index entry, std::span<const bool> contributes);
  void pass_waiting_updates(const Unit& unit);
  void no_longer_waiting(ChunkState& state);
  void cancel_job(Index job);
  void advance(Index job);
  void push(Task task, Index job);
  void unpush(Task task, Index job);
  void arrive(Index job);
  void finish_job(Index job);
  void cancel_entry(Index entry);
  bool may_be_gathering(Index entry) const;
  bool collective_may_start(Index entry) const;
  bool gather_needed(Index unit, bool update_expected, bool reuse) const;
  void reserve_jobs(Entry& entry, Index count);
  // Due or owed, and no job will do it.
  bool unclaimed(Index chunk) const {
    const ChunkState& state = chunk_states_[chunk];
    return (state.due || state.owed) && state.update_job == kNone;
  }
  bool unit_update_unclaimed(Index unit) const;
  bool nothing_expected() const {
    return entry_tail_ == kNone || entries_[entry_tail_].leased || entries_[entry_tail_].cancelled;
  }
  void end_entry_if_over(Index entry);
  bool entry_ready(const Entry& entry) const;
  bool held_by_trainer(const Job& job) const;
  bool gradient_on_nvme(Index chunk) const {
    return chunks_[chunk].gradients == Tier::nvme && units_[chunks_[chunk].unit].stored_gradients;
  }
  void gradient_is_here(const Job& job);
  bool running(const Job& job) const;
  void forget_copy(Index unit) { copies_[unit] = Copy{}; }
  static Task cpu_task(const Job& job) { return job.kind == JobKind::gradient ? Task::accumulate : Task::update; }
  static Task copy_task(const Job& job) { return job.kind == JobKind::gradient ? Task::copy_out : Task::copy_in; }
  Phase& phase(Job& job, Task task);
  SlotPool& pool(SlotKind kind) { return pools_[static_cast<std::size_t>(kind) - 1]; }
  Lane& lane(Task task) {
    if (task == Task::read_gradient) return lanes_[0];
    return lanes_[task == Task::accumulate ? 4 : static_cast<std::size_t>(task)];
  }

  std::vector<Chunk> chunks_;
  std::vector<Unit> units_;
  Limits limits_;
  std::vector<ChunkState> chunk_states_;
  std::vector<Copy> copies_;                  // by unit
  std::vector<List> unit_entries_;            // by unit, in program order
  std::vector<std::uint8_t> unit_changed_;    // updated since the last gather that was appended
  std::vector<std::uint8_t> unit_committed_;  // has committed gradients in the running step
  Collectives gathers_, reductions_;
  std::vector<Entry> entries_;
  std::vector<Index> free_entries_;
  std::vector<Index> entries_to_check_;  // may be over
  RangeMap ranges_;                      // the device's, by the last entry on them; what has ended counts as nobody's
  bool ranges_stale_ = false;            // an entry has ended that had not got its range: others lie beneath it
  std::vector<Wait> waits_;
  Index free_wait_ = kNone;
  List held_;  // entries
  std::vector<Job> jobs_;
  std::vector<Index> free_jobs_;
  std::array<SlotPool, 3> pools_;  // fetch, update, gradient
  std::array<Lane, 5> lanes_;      // read, write, copy in, copy out, cpu
  Index entry_head_ = kNone, entry_tail_ = kNone, entry_count_ = 0;
  Index jobs_alive_ = 0, gradient_jobs_ = 0, in_flight_ = 0;
  Index reserved_jobs_ = 0;  // of the free ones, kept for commits
  List waiting_updates_;     // the waiting_job of chunks, in program order
  Index updates_due_ = 0;    // chunks that are due or owed
  std::uint64_t next_key_ = 1;
  std::uint64_t cancellations_ = 0;
};

}  // namespace ballast::schedule
