// Executor: drives the scheduler on real hardware. One engine thread asks what may start, starts it on its lane (store,
// copy streams, CPU worker), collects what has ended and tells the scheduler. It owns the memory and the store.
//
// Locking: one mutex guards the scheduler and everything here that is not immutable; the engine's API calls take it
// too. Lanes report completions through a bounded queue of their own and the wake event, never under the mutex.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/error.h>
#include <ballast/base/wake_event.h>
#include <ballast/engine/communicator.h>
#include <ballast/engine/engine.h>
#include <ballast/engine/report.h>
#include <ballast/io/chunk_store.h>
#include <ballast/offload/chunk_work.h>
#include <ballast/offload/cpu_pool.h>
#include <ballast/offload/device.h>
#include <ballast/offload/machine_share.h>
#include <ballast/offload/slab.h>
#include <ballast/schedule/scheduler.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "durable/held_step.h"
#include "durable/manifest.h"
#include "durable/resident_chunks.h"
#include "plan.h"
#include "span_log.h"

namespace ballast::engine {

// Of a run that goes on from a committed step: the store it finds.
struct StoredChunks {
  std::array<std::uint8_t, 16> run_identity{};
  std::vector<StoredChunk> chunks;
};

// What the tests put in place of parts of the world.
struct TestHooks {
  std::function<io::OpenedStorage(io::Backend, const io::StorageOptions&, const std::string&)> storage_factory;
  std::function<void(std::string_view stream, std::size_t bytes)> before_copy;
  bool inline_pool = false;
  std::shared_ptr<io::SmallFiles> small_files;  // of committed steps
  // Of checkpoints that are saved while training goes on.
  std::function<io::OpenedStorage(io::Backend, const io::StorageOptions&, const std::string&)> checkpoint_storage;
  bool trusts_chunks = false;  // no checksum of a chunk is compared
  // What all memory of the host and the host device holds before anything is put there: 0xFF, NaN in every format.
  std::optional<std::uint8_t> memory_fill;
};

// The scalars of a unit's next update, by parameter. Written under the mutex while no update of the unit is under way.
struct UnitUpdate {
  std::vector<kernels::AdamScalars> scalars;
  std::vector<std::uint8_t> present;  // 0: the parameter had no gradient
};

class Executor {
  struct Work;

 public:
  using Lock = std::unique_lock<std::mutex>;
  using Log = std::function<void(LogLevel, std::string_view)>;

  // The engine's, then those of units, by UnitLayout::communicator; all outlive the executor. A failure ends them all.
  using Communicators = std::vector<Communicator*>;

  // Takes all memory, opens the store, starts the threads. The plan and the device outlive it. Collectives run on two
  // duplicates of each communicator: every rank makes its executor. `stored`: goes on from a committed step, whose
  // chunks it finds on NVMe; restore_chunk() then brings what lives elsewhere.
  Executor(const Plan& plan, const Config& config, offload::Device& device, Communicators communicators,
           const offload::MachineShare& share, const schedule::Limits& limits, const EngineEnvironment& environment,
           const TestHooks* hooks, const StoredChunks* stored = nullptr);
  ~Executor();

  std::mutex& mutex() { return mutex_; }
  schedule::Scheduler& scheduler() { return scheduler_; }  // under the mutex
  std::vector<UnitUpdate>& updates() { return updates_; }  // under the mutex
  // Under the mutex, before it is let go: there may be more to do.
  void wake() {
    at_rest_ = false;
    wake_.notify();
  }

  // Blocks until the predicate holds. Throws the latched failure instead, if there is one.
  template <class Predicate>
  void wait(Lock& lock, const Predicate& predicate) {
    wake();
    const std::uint64_t begin_ns = now_ns();
    changed_.wait(lock, [&] { return failure_ || predicate(); });
    waited_ns_ += now_ns() - begin_ns;
    check(lock);
  }
  // For streams: blocks until the predicate holds, the engine has failed or is closing. Never throws. A wait in which
  // nothing at all moves ends too: what was only expected gives its memory back after a while, and a stand-still that
  // outlasts even that becomes the latched failure.
  template <class Predicate>
  bool wait_on_stream(Lock& lock, const Predicate& predicate) {
    const auto over = [&] { return failure_ || closing_ || predicate(); };
    std::uint64_t seen = ended_tasks_;
    for (int still_seconds = 0; !changed_.wait_for(lock, std::chrono::seconds(1), over);) {
      still_seconds = seen == ended_tasks_ && scheduler_.quiet() ? still_seconds + 1 : 0;
      seen = ended_tasks_;
      // Several ranks: giving back by the clock would part them.
      if (still_seconds == kPatienceSeconds && plan_.world_size == 1) {
        scheduler_.cancel_expected();
        wake();
      }
      if (still_seconds == kStandStillSeconds) stand_still();
    }
    if (!failure_ && !closing_) return true;
    // What follows on this stream computes on anything; it must not do so while a copy still writes there.
    changed_.wait(lock, [&] { return free_works_.size() == works_.size(); });
    return false;
  }
  void check(const Lock&) const {
    if (failure_) std::rethrow_exception(failure_);
  }
  // Latches the first failure. Any thread, the mutex not held.
  void fail(std::exception_ptr failure);
  void fail_locked(std::exception_ptr failure);
  void begin_closing();  // stream waits end, nothing new starts
  bool failed(const Lock&) const { return failure_ != nullptr || closing_; }
  int threads() const { return pool_->threads(); }

  // Device memory of an opening.
  std::byte* window() const { return window_; }
  std::byte* parameter_base(std::uint32_t chunk) const;  // host or device tier; null on NVMe
  // A unit's whole parameters where they live on the device for good; null otherwise.
  std::byte* unit_parameters(std::uint32_t unit) const;
  std::byte* optimizer_base(std::uint32_t chunk) const;
  std::byte* gradient_store(std::uint32_t chunk) const;  // null where gradients are not stored, or are on NVMe
  // The chunk's sum of gradients that is on NVMe. Blocks; takes the mutex; `gradient` accepts direct transfers. Only
  // while no gradient is under way.
  void load_gradient(std::uint32_t chunk, std::byte* gradient);

  // A chunk's states as one contiguous extent [parameter, master, exp_avg, exp_avg_sq], wherever they are. Blocks. Only
  // while no job of the chunk is alive; takes the mutex.
  void load_chunk(std::uint32_t chunk, std::byte* extent);
  void save_chunk(std::uint32_t chunk, const std::byte* extent);
  // Of a chunk's parameter and of its optimizer's states.
  static std::pair<std::uint64_t, std::uint64_t> checksums_of(const ChunkLayout& chunk, const std::byte* extent);

  // --- durable steps: each chunk has two slots, and updates go to the one that no committed step refers to ----------

  // Which slots of the store are current; before anything is read or written.
  void set_stored_chunks(std::span<const StoredChunk> chunks);
  // Reads the chunk's committed slot, checks it, and brings what does not live on NVMe to its place. Throws
  // CorruptionError, and can then be called again after set_stored_chunks(). `extent` has room for a chunk's states.
  void restore_chunk(std::uint32_t chunk, std::byte* extent);
  // Optimizer steps taken, for what errors say. Any thread.
  void note_steps(std::uint64_t steps) { steps_ = steps; }
  // Under the mutex. Updates that were decided are done and, as far as states live on NVMe, written.
  bool updates_written(const Lock&) const { return scheduler_.updates_due() == 0 && writes_owed_ == 0; }
  ResidentChunks& resident_chunks() { return resident_chunks_; }  // under the mutex
  // On one thread other than the engine's. Writes what of the chunk does not live on NVMe. The memory is stable: no
  // update comes before mark_committed().
  void write_resident(std::uint32_t chunk);
  // Under the mutex.
  void stored_chunks(std::vector<StoredChunk>& chunks) const;
  void mark_committed(const Lock&) { committed_slot_ = current_slot_; }
  void flush_store() { store_->flush(); }

  // --- a committed step that is copied to a checkpoint while training goes on: what an update reads of it is copied
  // from there, before the update; a write that falls due over a chunk's slot waits until the chunk has been read, and
  // is what the copier reads first. All under the mutex
  // ------------------------------------------------------------------------

  // A chunk's committed states, one contiguous extent, in a buffer of the copier's or of an update that waits.
  struct HeldChunk {
    std::uint32_t chunk = 0;
    std::byte* states = nullptr;
    std::uint64_t bytes = 0;
    Work* work = nullptr;
  };

  // Before anything later than that step is written. None may be held. The copier is woken when there is something for
  // it, and by a failure; its event outlives let_go_all().
  void hold(std::span<const StoredChunk> chunks, base::WakeEvent& copier) {
    held_.hold(chunks);
    copier_ = &copier;
  }
  // Starts reading the next chunk into the buffer; false: there is none, or none that somebody waits for.
  bool read_held(const Lock&, std::byte* buffer, bool only_asked);
  // A chunk that is there; false: none is yet. Throws IoError where it could not be read, which fails the copy alone.
  bool take_held(const Lock&, HeldChunk* held);
  // Its memory is needed no more.
  void give_back(const Lock&, const HeldChunk& held);
  // At the end of the copy, whatever has become of it, when nothing uses such memory any more. Blocks while reads into
  // the copier's buffers are under way.
  void let_go_all(Lock& lock);
  std::uint64_t chunks_copied_first(const Lock&) const { return held_.asked_count(); }
  std::uint64_t chunks_copied_from_updates(const Lock&) const { return copied_from_updates_; }
  std::uint64_t copied_bytes(const Lock&) const { return copied_bytes_; }
  // No more can be there at a time. Without the mutex.
  std::size_t most_held_chunks() const { return works_.size(); }
  // CorruptionError where it is not what was committed. Without the mutex.
  void verify_copy(std::uint32_t chunk, const StoredChunk& stored, const std::byte* extent) const;
  // From the host's budget: for one chunk's states each.
  std::span<std::byte> copy_memory() const;
  std::vector<std::byte*> copy_buffers() const;
  const io::ChunkStore& store() const { return *store_; }
  const std::array<std::uint8_t, 16>& run_identity() const { return run_identity_; }
  template <class Predicate>
  void wait_quietly(Lock& lock, const Predicate& predicate) {
    changed_.wait(lock, [&] { return failure_ || predicate(); });
    check(lock);
  }
  void notify_changed() { changed_.notify_all(); }

  // Between memory of the device and of the host; blocks. As memcpy where the host can address the device.
  void copy_from_device(void* destination, const void* source, std::uint64_t bytes);
  void copy_to_device(void* destination, const void* source, std::uint64_t bytes);

  // Sums of squares of the chunk's last gradient, one per block; valid after its last contribution.
  std::span<const double> block_sums(std::uint32_t chunk) const;

  LaneReport lane_report(Lane lane, const Lock& lock) const;
  std::uint64_t waited_ns() const { return waited_ns_; }
  const offload::HostSlab* slab() const { return slab_.get(); }
  std::string backend_name() const;
  std::string backend_reason() const;
  std::uint64_t stored_bytes() const { return store_ ? store_->reserved_bytes() : 0; }
  std::vector<std::string> stored_files() const { return store_ ? store_->files() : std::vector<std::string>{}; }
  // Nothing is under way, and nothing can start before the next call of the trainer or the next step of a stream.
  bool at_rest(const Lock&) const { return at_rest_; }
  const SpanLog& spans() const { return spans_; }
  static std::uint64_t now_ns();

 private:
  struct LaneState {
    LaneReport report;
    std::uint32_t running = 0;
    std::uint64_t since_ns = 0;
  };
  // What a lane is doing for an action; lives until its completion has been handled.
  struct Work {
    schedule::Action action;
    std::uint64_t begin_ns = 0;
    io::Transfer transfer;
    bool synchronous = false;
    bool copies = false;  // a read of the copier's, whose error is not the engine's
    bool done = false;
    bool span_ended = false;
  };

  static constexpr int kPatienceSeconds = 5;
  static constexpr int kStandStillSeconds = 300;
  void stand_still();
  void run();
  bool collect();
  bool start_ready();
  void start(const schedule::Action& action);
  void start_transfer(Work& work);
  void wait_until_copied(Lock& lock, std::uint32_t chunk, std::uint32_t slot);
  bool hand_to_copier(Work& work);
  void held_is_there(Work& work);
  void start_copy(Work& work);
  void start_collective(Work& work);
  void enqueue_collective(const schedule::Action& action, const UnitLayout& unit, offload::Stream& stream);
  void end_task(Work& work);
  void finish(Work& work);
  void post(Work& work);
  void run_cpu_worker();
  void do_update(const Work& work);
  void do_accumulate(const Work& work);
  void open_device();  // of a device that the host cannot address: streams, pinned memory, failures
  void close_device();
  void register_with_communicators();
  void unregister_from_communicators();
  void update_states(const schedule::Action& action, const offload::ChunkArrays& arrays);
  void add_to_store(const schedule::Action& action, const std::byte* contribution);
  void square_sums(std::uint32_t chunk, const std::byte* total, bool on_device);
  void verify_fetched(const Work& work);
  void transfer_now(io::Direction direction, std::uint32_t chunk, std::uint32_t slot, std::uint64_t begin_bytes,
                    std::byte* data, std::uint64_t bytes, io::Priority priority = io::Priority::high);
  std::uint32_t write_slot(std::uint32_t chunk) const { return plan_.durable ? 1U - committed_slot_[chunk] : 0U; }
  bool keeps_elsewhere(std::uint32_t chunk) const {
    return plan_.placement[chunk].extent_bytes < plan_.placement[chunk].stored_bytes;
  }
  // A transfer of a gradient, not of states.
  static bool moves_gradient(const schedule::Action& action) {
    return action.task == schedule::Task::read_gradient || action.job_kind == schedule::JobKind::gradient;
  }
  // Where a gradient job's contribution is copied to: over the sum where it is the first.
  std::byte* incoming_gradient(const schedule::Action& action) const;
  std::uint32_t gradient_extent(std::uint32_t chunk) const { return chunks() + chunk; }
  std::uint32_t chunks() const { return static_cast<std::uint32_t>(plan_.layout.chunks.size()); }
  void verify_gradient(std::uint32_t chunk, const std::byte* sum, offload::CpuPool& pool) const;
  bool same_checksum(std::uint64_t found, std::uint64_t written) const { return found == written || trusts_chunks_; }
  bool is_whole(std::uint32_t chunk, const std::byte* extent, bool parameters, bool optimizer) const;
  CorruptionError corruption(std::uint32_t chunk, std::uint32_t slot, const char* what) const;
  std::exception_ptr transfer_failure(const io::Transfer& transfer) const;
  std::byte* slot_address(schedule::SlotKind kind, std::uint32_t slot) const;
  std::byte* parameter_address(const schedule::Action& action) const;
  offload::ChunkArrays arrays(const schedule::Action& action) const;
  Work& take_work();
  void begin_span(Lane lane);
  void end_span(Lane lane, std::uint64_t bytes);
  static Lane lane_of(schedule::Task task);
  std::uint64_t bytes_of(const schedule::Action& action) const;
  std::string chunk_name(std::uint32_t chunk) const;

  const Plan& plan_;
  offload::Device& device_;
  Log log_;
  kernels::ElementType gradient_type_;
  kernels::ElementType moment_type_;
  std::uint64_t gradient_bytes_;
  const Communicators communicators_;
  const bool trusts_chunks_;

  base::WakeEvent wake_;
  std::mutex mutex_;
  std::condition_variable changed_;
  schedule::Scheduler scheduler_;
  std::vector<UnitUpdate> updates_;
  std::exception_ptr failure_;
  bool closing_ = false;
  bool stopping_ = false;
  bool at_rest_ = false;
  std::uint64_t ended_tasks_ = 0;
  std::uint64_t waited_ns_ = 0;

  std::unique_ptr<offload::HostSlab> slab_;
  // What the device knows of this executor, and forgets before the memory goes; also where construction fails.
  struct DeviceBinding {
    offload::Device& device;
    std::span<std::byte> pinned;
    ~DeviceBinding();
  };
  std::unique_ptr<DeviceBinding> device_binding_;
  std::unique_ptr<offload::CpuPool> pool_;         // the CPU worker's
  std::unique_ptr<offload::CpuPool> pool_serial_;  // for callers on other threads
  std::unique_ptr<io::ChunkStore> store_;
  std::byte* device_slab_ = nullptr;
  std::byte* window_ = nullptr;
  std::byte *host_gradients_ = nullptr, *host_parameters_ = nullptr, *host_optimizer_ = nullptr;
  std::byte *fetch_slots_ = nullptr, *update_slots_ = nullptr, *gradient_slots_ = nullptr;

  std::vector<std::uint64_t> parameter_checksums_, optimizer_checksums_;  // of what is on NVMe
  std::vector<std::uint64_t> gradient_checksums_;
  // Durable steps: where each chunk's newest written states are, and those of the last committed step.
  std::vector<std::uint8_t> current_slot_, committed_slot_;
  ResidentChunks resident_chunks_;
  std::uint32_t writes_owed_ = 0;  // updates whose states have still to be written
  HeldStep held_;
  std::vector<Work*> waiting_for_copies_;           // writes
  std::vector<HeldChunk> held_ready_, held_taken_;  // for the copier, and with it
  base::WakeEvent* copier_ = nullptr;               // null: nothing is copied
  std::uint32_t copies_reading_ = 0;
  std::uint64_t copied_bytes_ = 0, copied_from_updates_ = 0;
  std::byte* copy_slots_ = nullptr;
  std::array<std::uint8_t, 16> run_identity_{};
  std::atomic<std::uint64_t> steps_{0};
  std::byte* staging_ = nullptr;
  std::vector<double> block_sums_;
  std::vector<offload::UpdateSegment> segments_;  // the CPU worker's scratch
  std::vector<schedule::Action> batch_;
  std::vector<io::Transfer*> submitting_, finished_;
  std::vector<std::unique_ptr<Work>> works_;
  std::vector<Work*> free_works_;
  std::array<LaneState, kLaneCount> lanes_;
  SpanLog spans_;

  std::mutex completions_mutex_;
  std::vector<Work*> completions_, completions_taken_;
  std::exception_ptr device_failure_;  // guarded by completions_mutex_

  std::mutex cpu_mutex_;
  std::condition_variable cpu_changed_;
  std::vector<Work*> cpu_queue_;
  bool cpu_stopping_ = false;

  std::unique_ptr<offload::Stream> copy_in_, copy_out_;
  // Where the host cannot address the device.
  std::unique_ptr<offload::Stream> kernel_stream_;  // the CPU worker's
  std::unique_ptr<offload::Stream> whole_stream_;   // of whole chunks for initial values and reading back
  std::vector<std::byte> staged_states_;            // of a chunk whose states lie on both sides
  // What units' collectives run on, by UnitLayout::communicator; one rank: none.
  struct Channels {
    std::shared_ptr<Communicator> gather, reduce;  // among the ranks that hold one copy together
    std::shared_ptr<Communicator> replicas;        // between the ranks of shard groups that hold the same shard
  };
  std::vector<Channels> channels_;
  std::unique_ptr<offload::Stream> gather_stream_, reduce_stream_;
  std::thread engine_thread_, cpu_thread_;
};

}  // namespace ballast::engine
