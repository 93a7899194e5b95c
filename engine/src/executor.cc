// The engine thread, the lanes and their memory.
// SPDX-License-Identifier: Apache-2.0
#include "executor.h"

#include <ballast/base/check.h>
#include <ballast/base/error.h>
#include <ballast/base/random.h>
#include <ballast/base/size.h>
#include <ballast/kernels/reduce.h>
#include <ballast/offload/topology.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "plan_schedule.h"

namespace ballast::engine {

using schedule::Action;
using schedule::JobKind;
using schedule::kNone;
using schedule::SlotKind;
using schedule::Task;

namespace {

std::array<std::uint8_t, 16> new_identity() {
  // Tells this run's files from another's; not a secret.
  const auto now = static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  static std::atomic<std::uint64_t> counter{0};
  const std::uint64_t words[2] = {base::mix(now),
                                  base::mix(now ^ base::mix(reinterpret_cast<std::uintptr_t>(&counter) + ++counter))};
  std::array<std::uint8_t, 16> identity;
  std::memcpy(identity.data(), words, sizeof words);
  return identity;
}

io::Backend to_backend(const std::string& name) {
  return name == "io_uring" ? io::Backend::io_uring : name == "threads" ? io::Backend::threads : io::Backend::automatic;
}

}  // namespace

std::uint64_t Executor::now_ns() {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

Executor::Executor(const Plan& plan, const Config& config, offload::Device& device, Communicators communicators,
                   const offload::MachineShare& share, const schedule::Limits& limits,
                   const EngineEnvironment& environment, const TestHooks* hooks, const StoredChunks* stored)
    : plan_(plan),
      device_(device),
      log_(environment.log),
      gradient_type_(config.precision.gradients == DataType::bf16 ? kernels::ElementType::bf16
                                                                  : kernels::ElementType::fp32),
      moment_type_(config.precision.moments == MomentType::bf16   ? kernels::ElementType::bf16
                   : config.precision.moments == MomentType::int8 ? kernels::ElementType::int8
                                                                  : kernels::ElementType::fp32),
      gradient_bytes_(element_bytes(config.precision.gradients)),
      communicators_(std::move(communicators)),
      trusts_chunks_(hooks != nullptr && hooks->trusts_chunks),
      scheduler_(schedule_chunks(plan, gradient_bytes_), schedule_units(plan, gradient_bytes_), limits),
      resident_chunks_(plan.layout.chunks.size()),
      held_(plan.layout.chunks.size()) {
  const int threads = config.threads.value_or(share.threads);
  pool_ = hooks && hooks->inline_pool ? offload::make_inline_pool() : offload::make_tbb_pool(threads, share.cpus);
  pool_serial_ = offload::make_inline_pool();

  std::vector<std::string> notes;
  if (plan.host_bytes > 0) {
    offload::HostSlabOptions options;
    options.bytes = plan.host_bytes;
    options.check_interrupt = environment.check_interrupt;
    // Ranks that share the machine stay in their own parts of it; one alone is near its drive.
    options.numa_node = device.numa_node() >= 0 ? device.numa_node()
                        : share.ranks > 1       ? share.numa_node
                        : plan.uses_nvme        ? offload::numa_node_of_path(config.nvme.paths.front())
                                                : -1;
    slab_ = std::make_unique<offload::HostSlab>(options);
    const auto take = [&](const char* name, std::uint64_t bytes) -> std::byte* {
      return bytes == 0 ? nullptr : slab_->take(name, bytes, 64);
    };
    // In the plan's order, so that the slots begin on a page.
    host_gradients_ = take("gradients", plan.host_gradient_bytes);
    host_parameters_ = take("resident parameters", plan.host_parameter_bytes);
    host_optimizer_ = take("resident optimizer states", plan.host_optimizer_bytes);
    const auto take_slots = [&](const char* name, std::uint64_t bytes) -> std::byte* {
      return bytes == 0 ? nullptr : slab_->take(name, bytes, 4096);
    };
    staging_ = take_slots("staging for committed steps", plan.staging_bytes);
    update_slots_ = take_slots("update slots", plan.update_slots * plan.update_slot_bytes);
    fetch_slots_ = take_slots("fetch slots", plan.fetch_slots * plan.fetch_slot_bytes);
    gradient_slots_ = take_slots("gradient slots", plan.gradient_slots * plan.gradient_slot_bytes);
    copy_slots_ = take_slots("copies for checkpoints", plan.copy_slots * plan.copy_slot_bytes);
    for (const std::string& note : slab_->notes()) {
      if (log_) log_(LogLevel::info, note);
    }
  }
  run_identity_ = stored != nullptr ? stored->run_identity : new_identity();
  // The ranks' parts of what is stored know each other by it.
  if (stored == nullptr && plan.world_size > 1)
    communicators_.front()->broadcast(std::as_writable_bytes(std::span(run_identity_)), 0);
  if (plan.uses_nvme) {
    io::ChunkStoreOptions options;
    options.paths = config.nvme.paths;
    options.rank = plan.rank;
    options.backend = to_backend(config.nvme.backend);
    options.storage.block_bytes = config.nvme.block_bytes;
    options.storage.queue_depth = config.nvme.queue_depth;
    options.storage.wake = &wake_;
    options.run_identity = run_identity_;
    for (const ChunkPlacement& place : plan.placement) options.chunk_bytes.push_back(place.stored_bytes);
    options.lasting_chunks = options.chunk_bytes.size();
    for (std::size_t c = 0; plan.nvme_gradients && c < plan.placement.size(); ++c) {
      options.chunk_bytes.push_back(plan.placement[c].gradient_extent_bytes);
    }
    options.slots_per_chunk = plan.durable ? 2 : 1;
    options.keep_on_close = plan.durable;
    options.must_exist = stored != nullptr;
    options.note = [this](std::string note) {
      if (log_) log_(LogLevel::info, note);
    };
    if (hooks) options.storage_factory = hooks->storage_factory;
    store_ = std::make_unique<io::ChunkStore>(std::move(options));
    std::string reason;
    if (slab_ && !store_->register_memory(slab_->memory(), &reason) && log_) {
      log_(LogLevel::warning,
           "host memory is not registered with the drive's queue (" + reason + "); transfers work, slower");
    }
  }

  // A device gives its memory once: taken when all else has been had, so that a commit that failed can be tried again.
  if (plan.device_bytes > 0) device_slab_ = device.take_slab(plan.device_bytes);
  window_ = device_slab_ + plan.device_parameter_bytes + plan.device_optimizer_bytes + plan.device_gradient_bytes;
  if (hooks != nullptr && hooks->memory_fill) {
    if (slab_) std::memset(slab_->memory().data(), *hooks->memory_fill, slab_->memory().size());
    if (device_slab_ != nullptr && device.host_addressable())
      std::memset(device_slab_, *hooks->memory_fill, plan.device_bytes);
  }

  parameter_checksums_.resize(plan.layout.chunks.size());
  optimizer_checksums_.resize(plan.layout.chunks.size());
  gradient_checksums_.resize(plan.layout.chunks.size());
  current_slot_.assign(plan.layout.chunks.size(), 0);
  committed_slot_.assign(plan.layout.chunks.size(), 1);  // so that initial values go to slot 0
  if (stored != nullptr) set_stored_chunks(stored->chunks);
  block_sums_.resize(plan.layout.blocks);
  std::size_t most_segments = 0;
  for (const ChunkLayout& chunk : plan.layout.chunks)
    most_segments = std::max<std::size_t>(most_segments, chunk.segment_count);
  segments_.reserve(most_segments);
  for (const UnitLayout& unit : plan.layout.units) {
    updates_.push_back({std::vector<kernels::AdamScalars>(unit.parameters.size()),
                        std::vector<std::uint8_t>(unit.parameters.size(), 0)});
  }

  const std::size_t most =
      limits.reads + limits.writes + limits.copies_in + limits.copies_out + limits.cpu_tasks + plan.copy_slots + 6;
  batch_.resize(most);
  for (std::size_t i = 0; i < most; ++i) {
    works_.push_back(std::make_unique<Work>());
    free_works_.push_back(works_.back().get());
  }
  submitting_.reserve(most);
  waiting_for_copies_.reserve(most);
  held_ready_.reserve(most);
  held_taken_.reserve(most);
  finished_.resize(most);
  completions_.reserve(most);
  completions_taken_.reserve(most);
  cpu_queue_.reserve(most);
  copy_in_ = device.make_stream("copy in");
  copy_out_ = device.make_stream("copy out");
  open_device();
  if (plan.world_size > 1) {
    for (Communicator* each : communicators_) {
      Channels& channels = channels_.emplace_back();
      if (each != communicators_.front()) {
        channels.gather = each->duplicate();
        channels.reduce = each->duplicate();
        continue;
      }
      const auto group = static_cast<int>(plan.rank / plan.partition.world_size);
      channels.gather = each->split(group);
      channels.reduce = each->split(group);
      if (plan.partition.world_size < plan.world_size)
        channels.replicas = each->split(static_cast<int>(plan.partition.rank));
    }
    gather_stream_ = device.make_stream("gather");
    reduce_stream_ = device.make_stream("reduce");
    register_with_communicators();
  }
  // A system that refuses costs speed alone.
  cpu_thread_ = std::thread([this, cpus = share.cpus] {
    static_cast<void>(offload::keep_thread_on(cpus));
    run_cpu_worker();
  });
  engine_thread_ = std::thread([this, cpus = share.cpus] {
    static_cast<void>(offload::keep_thread_on(cpus));
    run();
  });
}

Executor::~Executor() {
  begin_closing();
  {
    const Lock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify();
  engine_thread_.join();
  {
    const std::lock_guard<std::mutex> lock(cpu_mutex_);
    cpu_stopping_ = true;
  }
  cpu_changed_.notify_all();
  cpu_thread_.join();
  gather_stream_.reset();
  reduce_stream_.reset();
  unregister_from_communicators();
  copy_in_.reset();  // drains
  copy_out_.reset();
  close_device();
  store_.reset();  // cancels, drains
}

void Executor::begin_closing() {
  {
    const Lock lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
}

void Executor::fail_locked(std::exception_ptr failure) {
  if (!failure_) {
    failure_ = std::move(failure);
    // The other ranks must not wait for what this one will not do any more.
    try {
      std::rethrow_exception(failure_);
    } catch (const std::exception& error) {
      for (Communicator* each : communicators_) each->abort(error.what());
    } catch (...) {
      for (Communicator* each : communicators_) each->abort("an exception of an unknown kind");
    }
  }
  if (copier_ != nullptr) copier_->notify();
  changed_.notify_all();
}

void Executor::stand_still() {
  fail_locked(std::make_exception_ptr(UsageError(
      "a stream has waited " + std::to_string(kStandStillSeconds) +
      " s for a unit while nothing moved; release units that are no longer needed, or raise the budgets. State: " +
      scheduler_.describe())));
}

void Executor::fail(std::exception_ptr failure) {
  const Lock lock(mutex_);
  fail_locked(std::move(failure));
}

// --- the engine thread -----------------------------------------------------------------------------------------------

void Executor::run() {
  for (;;) {
    {
      const Lock lock(mutex_);
      try {
        collect();
        // What has started may have ended at once, and made room for more.
        while (start_ready() && collect()) {
        }
      } catch (...) {
        fail_locked(std::current_exception());
      }
      at_rest_ = free_works_.size() == works_.size();
      changed_.notify_all();
      if (stopping_) return;
    }
    wake_.wait(-1);
  }
}

bool Executor::collect() {
  {
    const std::lock_guard<std::mutex> lock(completions_mutex_);
    completions_taken_.swap(completions_);
    if (device_failure_) fail_locked(device_failure_);
  }
  bool any = !completions_taken_.empty();
  for (Work* work : completions_taken_) finish(*work);
  completions_taken_.clear();
  if (store_) {
    while (const std::size_t count = store_->poll(finished_, false)) {
      any = true;
      for (std::size_t i = 0; i < count; ++i) {
        Work& work = *reinterpret_cast<Work*>(finished_[i]->tag);
        if (work.copies) {
          --copies_reading_;
          held_is_there(work);
          continue;
        }
        if (finished_[i]->error_number != 0) fail_locked(transfer_failure(*finished_[i]));
        if (work.synchronous) {
          work.done = true;
        } else if (!hand_to_copier(work)) {
          finish(work);
        }
      }
    }
  }
  return any;
}

bool Executor::start_ready() {
  if (failure_ || closing_) return false;
  const std::size_t count = scheduler_.next(batch_);
  for (std::size_t i = 0; i < count; ++i) start(batch_[i]);
  if (!submitting_.empty()) {
    store_->submit(submitting_);
    submitting_.clear();
  }
  return count > 0;
}

Lane Executor::lane_of(Task task) {
  switch (task) {
    case Task::read:
    case Task::read_gradient:
      return Lane::nvme_read;
    case Task::write:
      return Lane::nvme_write;
    case Task::copy_in:
      return Lane::host_to_device;
    case Task::copy_out:
      return Lane::device_to_host;
    case Task::gather:
    case Task::reduce:
      return Lane::collective;
    case Task::update:
    case Task::accumulate:
      break;
  }
  return Lane::cpu;
}

std::uint64_t Executor::bytes_of(const Action& action) const {
  if (action.chunk == kNone) {
    // What this rank receives; a reduction of whole gradients (stage 0) is a scatter and a gather.
    std::uint64_t elements_bytes = 0;
    const UnitLayout& unit = plan_.layout.units[action.unit];
    for (const Section& section : unit.sections) {
      if (action.task == Task::gather) elements_bytes += section.shard_elements * element_bytes(section.dtype);
      if (action.task == Task::reduce && section.trainable) elements_bytes += section.shard_elements * gradient_bytes_;
    }
    const std::uint64_t ways = action.task == Task::reduce && plan_.zero_stage == 0 ? 2 : 1;
    std::uint64_t bytes = ways * elements_bytes * (unit.partition.world_size - 1);
    const std::uint64_t groups = unit.communicator != 0 ? 1 : plan_.world_size / plan_.partition.world_size;
    if (action.task == Task::reduce) bytes += 2 * elements_bytes * (groups - 1) / groups;
    return bytes;
  }
  const ChunkLayout& chunk = plan_.layout.chunks[action.chunk];
  const std::uint64_t gradient = chunk.elements * gradient_bytes_;
  switch (action.task) {
    case Task::read:
    case Task::write:
      return action.job_kind == JobKind::gradient ? gradient
             : action.job_kind == JobKind::fetch  ? chunk.parameter_bytes
                                                  : plan_.placement[action.chunk].extent_bytes;
    case Task::read_gradient:
      return gradient;
    case Task::copy_in:
      return chunk.parameter_bytes;
    case Task::copy_out:
      return gradient;
    case Task::update:
      return 2 * (chunk.parameter_bytes + chunk.optimizer_bytes()) + gradient;
    case Task::accumulate:
    case Task::gather:
    case Task::reduce:
      break;
  }
  return action.first ? gradient : 3 * gradient;
}

void Executor::begin_span(Lane lane) {
  LaneState& state = lanes_[static_cast<std::size_t>(lane)];
  if (state.running++ == 0) state.since_ns = now_ns();
  ++state.report.tasks;
}

// Only what has been moved counts as moved: a time that ends with transfers under way has not seen them.
void Executor::end_span(Lane lane, std::uint64_t bytes) {
  LaneState& state = lanes_[static_cast<std::size_t>(lane)];
  state.report.bytes += bytes;
  if (--state.running == 0) state.report.busy_ns += now_ns() - state.since_ns;
}

LaneReport Executor::lane_report(Lane lane, const Lock&) const {
  const LaneState& state = lanes_[static_cast<std::size_t>(lane)];
  LaneReport report = state.report;
  report.running = state.running;
  if (state.running > 0) report.busy_ns += now_ns() - state.since_ns;
  return report;
}

Executor::Work& Executor::take_work() {
  BALLAST_CHECK(!free_works_.empty());
  Work& work = *free_works_.back();
  free_works_.pop_back();
  work.synchronous = work.copies = work.done = work.span_ended = false;
  return work;
}

void Executor::start(const Action& action) {
  Work& work = take_work();
  work.action = action;
  work.begin_ns = now_ns();
  begin_span(lane_of(action.task));
  switch (action.task) {
    case Task::read:
    case Task::read_gradient:
    case Task::write:
      start_transfer(work);
      break;
    case Task::copy_in:
    case Task::copy_out:
      start_copy(work);
      break;
    case Task::gather:
    case Task::reduce:
      start_collective(work);
      break;
    case Task::update:
    case Task::accumulate: {
      {
        const std::lock_guard<std::mutex> lock(cpu_mutex_);
        cpu_queue_.push_back(&work);
      }
      cpu_changed_.notify_one();
      break;
    }
  }
}

void Executor::end_task(Work& work) {
  if (std::exchange(work.span_ended, true)) return;
  const Action& action = work.action;
  static constexpr const char* kNames[schedule::kTaskCount] = {
      "read", "write", "copy in", "copy out", "update", "accumulate", "gather", "reduce", "read gradient"};
  const Lane lane = lane_of(action.task);
  const std::uint64_t bytes = bytes_of(action);
  end_span(lane, bytes);
  ++ended_tasks_;
  spans_.add({lane, kNames[static_cast<int>(action.task)], action.unit, action.chunk, work.begin_ns, now_ns(), bytes});
}

void Executor::finish(Work& work) {
  const Action& action = work.action;
  end_task(work);
  if (action.chunk == kNone) {
    try {
      const Channels& channels = channels_[plan_.layout.units[action.unit].communicator];
      (action.task == Task::gather ? channels.gather : channels.reduce)->check();
      if (action.task == Task::reduce && channels.replicas) channels.replicas->check();
    } catch (...) {
      fail_locked(std::current_exception());
    }
  }
  if (plan_.durable && action.task == Task::update) {
    writes_owed_ += plan_.placement[action.chunk].extent_bytes > 0;
    if (keeps_elsewhere(action.chunk)) resident_chunks_.updated(action.chunk);
  }
  if (plan_.durable && action.task == Task::write && !moves_gradient(action)) {
    --writes_owed_;
    current_slot_[action.chunk] = static_cast<std::uint8_t>(write_slot(action.chunk));
  }
  // After a failure nothing may take a half-done task for a finished one.
  if (!failure_) scheduler_.finished(action);
  free_works_.push_back(&work);
}

void Executor::post(Work& work) {
  {
    const std::lock_guard<std::mutex> lock(completions_mutex_);
    completions_.push_back(&work);
  }
  wake_.notify();
}

}  // namespace ballast::engine
