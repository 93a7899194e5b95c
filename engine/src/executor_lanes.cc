// What the executor's lanes do: transfers, copies, updates, and whole chunks for initial values and reading back.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/base/error.h>
#include <ballast/kernels/reduce.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>

#include "executor.h"

namespace ballast::engine {

using schedule::Action;
using schedule::JobKind;
using schedule::kNone;
using schedule::SlotKind;
using schedule::Task;

// --- addresses -------------------------------------------------------------------------------------------------------

std::byte* Executor::parameter_base(std::uint32_t chunk) const {
  const ChunkPlacement& place = plan_.placement[chunk];
  switch (place.parameters) {
    case Tier::host:
      return host_parameters_ + place.parameter_offset;
    case Tier::device:
      return device_slab_ + place.parameter_offset;
    case Tier::nvme:
      break;
  }
  return nullptr;
}

std::byte* Executor::unit_parameters(std::uint32_t unit) const {
  const UnitLayout& layout = plan_.layout.units[unit];
  const bool here = layout.chunk_count > 0 && plan_.placement[layout.first_chunk].parameters == Tier::device;
  return here ? device_slab_ + plan_.unit_parameter_offset[unit] : nullptr;
}

std::byte* Executor::optimizer_base(std::uint32_t chunk) const {
  const ChunkPlacement& place = plan_.placement[chunk];
  switch (place.optimizer) {
    case Tier::host:
      return host_optimizer_ + place.optimizer_offset;
    case Tier::device:
      return device_slab_ + plan_.device_parameter_bytes + place.optimizer_offset;
    case Tier::nvme:
      break;
  }
  return nullptr;
}

std::byte* Executor::gradient_store(std::uint32_t chunk) const {
  const ChunkLayout& layout = plan_.layout.chunks[chunk];
  const ChunkPlacement& place = plan_.placement[chunk];
  if (!layout.trainable || !plan_.stored_gradients[layout.unit]) return nullptr;
  if (place.gradients == Tier::nvme) return nullptr;
  return place.gradients == Tier::device
             ? device_slab_ + plan_.device_parameter_bytes + plan_.device_optimizer_bytes + place.gradient_offset
             : host_gradients_ + place.gradient_offset;
}

std::byte* Executor::incoming_gradient(const Action& action) const {
  std::byte* const slot = slot_address(SlotKind::gradient, action.slot);
  return action.first ? slot : slot + plan_.placement[action.chunk].gradient_extent_bytes;
}

std::byte* Executor::slot_address(SlotKind kind, std::uint32_t slot) const {
  switch (kind) {
    case SlotKind::fetch:
      return fetch_slots_ + slot * plan_.fetch_slot_bytes;
    case SlotKind::update:
      return update_slots_ + slot * plan_.update_slot_bytes;
    case SlotKind::gradient:
      return gradient_slots_ + slot * plan_.gradient_slot_bytes;
    case SlotKind::none:
      break;
  }
  return nullptr;
}

std::byte* Executor::parameter_address(const Action& action) const {
  std::byte* base = parameter_base(action.chunk);
  return base != nullptr ? base : slot_address(action.slot_kind, action.slot);
}

offload::ChunkArrays Executor::arrays(const Action& action) const {
  const ChunkLayout& chunk = plan_.layout.chunks[action.chunk];
  offload::ChunkArrays a;
  a.parameter_format = chunk.dtype == DataType::bf16   ? kernels::ParameterFormat::split_bf16
                       : chunk.dtype == DataType::fp16 ? kernels::ParameterFormat::fp16
                                                       : kernels::ParameterFormat::fp32;
  a.moment_type = moment_type_;
  a.gradient_type = gradient_type_;
  a.parameter = parameter_address(action);
  std::byte* optimizer = optimizer_base(action.chunk);
  if (optimizer == nullptr) {
    optimizer = slot_address(action.slot_kind, action.slot) +
                (plan_.placement[action.chunk].parameters == Tier::nvme ? chunk.parameter_bytes : 0);
  }
  a.master = chunk.master_bytes > 0 ? optimizer : nullptr;
  a.exp_avg = optimizer + chunk.master_bytes;
  a.exp_avg_sq = optimizer + chunk.master_bytes + chunk.moment_bytes;
  const ChunkPlacement& place = plan_.placement[action.chunk];
  a.gradient = place.gradient_extent_bytes > 0 ? slot_address(SlotKind::update, action.slot) + place.extent_bytes
               : action.gradient_slot != kNone ? slot_address(SlotKind::gradient, action.gradient_slot)
                                               : gradient_store(action.chunk);
  return a;
}

// --- lanes -----------------------------------------------------------------------------------------------------------

void Executor::start_transfer(Work& work) {
  const Action& action = work.action;
  io::Transfer& transfer = work.transfer;
  const bool read = action.task == Task::read;
  transfer.direction = read ? io::Direction::read : io::Direction::write;
  transfer.priority =
      action.urgent || (read && action.job_kind == JobKind::fetch) ? io::Priority::high : io::Priority::low;
  if (moves_gradient(action)) {
    const bool of_update = action.task == Task::read_gradient;
    transfer.direction = action.task == Task::write ? io::Direction::write : io::Direction::read;
    transfer.priority = action.urgent || !of_update ? io::Priority::high : io::Priority::low;
    transfer.chunk = gradient_extent(action.chunk);
    transfer.slot = 0;
    transfer.begin_bytes = 0;
    transfer.data = slot_address(of_update ? SlotKind::update : SlotKind::gradient, action.slot) +
                    (of_update ? plan_.placement[action.chunk].extent_bytes : 0);
    transfer.bytes = bytes_of(action);
    transfer.tag = reinterpret_cast<std::uintptr_t>(&work);
    submitting_.push_back(&transfer);
    return;
  }
  transfer.chunk = action.chunk;
  transfer.slot = read ? current_slot_[action.chunk] : write_slot(action.chunk);
  transfer.begin_bytes = plan_.placement[action.chunk].extent_begin_bytes;
  transfer.data = slot_address(action.slot_kind, action.slot);
  transfer.bytes = bytes_of(action);
  transfer.tag = reinterpret_cast<std::uintptr_t>(&work);
  if (!read && held_.holds(action.chunk, transfer.slot)) {
    held_.ask_for(action.chunk);
    waiting_for_copies_.push_back(&work);
    return;
  }
  submitting_.push_back(&transfer);
}

void Executor::start_copy(Work& work) {
  const Action& action = work.action;
  const ChunkLayout& chunk = plan_.layout.chunks[action.chunk];
  if (action.task == Task::copy_in) {
    if (plan_.placement[action.chunk].parameters == Tier::nvme && action.job_kind == JobKind::fetch) {
      copy_in_->call({[](void* context, std::uint64_t argument) {
                        static_cast<Executor*>(context)->verify_fetched(*reinterpret_cast<Work*>(argument));
                      },
                      this, reinterpret_cast<std::uintptr_t>(&work)});
    }
    copy_in_->copy(window_ + action.device_offset + chunk.device_offset, parameter_address(action),
                   chunk.parameter_bytes);
  } else {
    std::byte* destination = action.slot != kNone ? incoming_gradient(action) : gradient_store(action.chunk);
    copy_out_->copy(destination, window_ + action.device_offset + chunk.begin * gradient_bytes_,
                    chunk.elements * gradient_bytes_);
  }
  offload::Stream& stream = action.task == Task::copy_in ? *copy_in_ : *copy_out_;
  stream.notify({[](void* context, std::uint64_t argument) {
                   static_cast<Executor*>(context)->post(*reinterpret_cast<Work*>(argument));
                 },
                 this, reinterpret_cast<std::uintptr_t>(&work)});
}

// One call for each section: nearly always one for a unit.
void Executor::start_collective(Work& work) {
  const Action& action = work.action;
  const UnitLayout& unit = plan_.layout.units[action.unit];
  offload::Stream& stream = action.task == Task::gather ? *gather_stream_ : *reduce_stream_;
  try {
    enqueue_collective(action, unit, stream);
  } catch (...) {
    fail_locked(std::current_exception());
  }
  stream.call({[](void* context, std::uint64_t argument) {
                 static_cast<Executor*>(context)->post(*reinterpret_cast<Work*>(argument));
               },
               this, reinterpret_cast<std::uintptr_t>(&work)});
}

void Executor::enqueue_collective(const Action& action, const UnitLayout& unit, offload::Stream& stream) {
  const Channels& channels = channels_[unit.communicator];
  for (Communicator* each : {channels.gather.get(), channels.reduce.get(), channels.replicas.get()}) {
    if (each != nullptr) each->set_unit(action.unit);
  }
  if (action.task == Task::gather) {
    std::byte* const own = unit_parameters(action.unit);
    std::byte* const base = own != nullptr ? own : window_ + action.device_offset;
    for (const Section& section : unit.sections) {
      channels.gather->all_gather(base + section.device_offset, section.shard_elements * element_bytes(section.dtype),
                                  stream);
    }
    return;
  }
  const DataType type = gradient_type_ == kernels::ElementType::bf16 ? DataType::bf16 : DataType::fp32;
  for (const Section& section : unit.sections) {
    if (!section.trainable) continue;
    std::byte* const data = window_ + action.device_offset + section.begin * gradient_bytes_;
    if (plan_.zero_stage == 0) {
      if (unit.partition.world_size > 1)
        channels.reduce->all_reduce_sum(data, section.shard_elements * unit.partition.world_size, type, stream);
      continue;
    }
    std::byte* const part = data + unit.partition.rank * section.shard_elements * gradient_bytes_;
    if (unit.partition.world_size > 1)
      channels.reduce->reduce_scatter_sum(data, part, section.shard_elements, type, stream);
    if (channels.replicas) channels.replicas->all_reduce_sum(part, section.shard_elements, type, stream);
  }
}

std::string Executor::chunk_name(std::uint32_t chunk) const {
  if (chunk >= chunks()) return "gradients of " + chunk_name(chunk - chunks());
  const ChunkLayout& layout = plan_.layout.chunks[chunk];
  const UnitLayout& unit = plan_.layout.units[layout.unit];
  return "chunk " + std::to_string(chunk - unit.first_chunk) + " of unit " + unit.name;
}

std::exception_ptr Executor::transfer_failure(const io::Transfer& transfer) const {
  // The file ends before it: somebody has cut it.
  if (transfer.direction == io::Direction::read && transfer.error_number == ENODATA) {
    return std::make_exception_ptr(corruption(transfer.chunk, transfer.slot, "bytes"));
  }
  return std::make_exception_ptr(IoError(
      std::string(transfer.direction == io::Direction::read ? "reading " : "writing ") + chunk_name(transfer.chunk) +
      " (" + std::to_string(transfer.bytes) + " bytes, " + store_->describe(transfer) + ") failed: " +
      std::strerror(transfer.error_number) + "; check the drive and its file system; the run cannot go on from here"));
}

// On the copy stream, between the arrival of a chunk's parameters and their copy to the device.
void Executor::verify_fetched(const Work& work) {
  const ChunkLayout& chunk = plan_.layout.chunks[work.action.chunk];
  const std::uint64_t found =
      offload::checksum(*pool_serial_, slot_address(work.action.slot_kind, work.action.slot), chunk.parameter_bytes);
  if (same_checksum(found, parameter_checksums_[work.action.chunk])) return;
  fail(std::make_exception_ptr(corruption(work.action.chunk, work.transfer.slot, "parameters")));
}

void Executor::run_cpu_worker() {
  for (;;) {
    Work* work = nullptr;
    {
      std::unique_lock<std::mutex> lock(cpu_mutex_);
      cpu_changed_.wait(lock, [&] { return cpu_stopping_ || !cpu_queue_.empty(); });
      if (cpu_queue_.empty()) return;
      work = cpu_queue_.front();
      cpu_queue_.erase(cpu_queue_.begin());
    }
    try {
      if (work->action.task == Task::update) {
        do_update(*work);
      } else {
        do_accumulate(*work);
      }
    } catch (...) {
      fail(std::current_exception());
    }
    post(*work);
  }
}

void Executor::do_update(const Work& work) {
  const Action& action = work.action;
  const ChunkLayout& chunk = plan_.layout.chunks[action.chunk];
  const ChunkPlacement& place = plan_.placement[action.chunk];
  const offload::ChunkArrays a = arrays(action);
  const bool parameters_read = place.parameters == Tier::nvme;
  const bool optimizer_read = place.optimizer == Tier::nvme;
  std::byte* const optimizer = a.exp_avg - chunk.master_bytes;
  if ((parameters_read && !same_checksum(offload::checksum(*pool_, a.parameter, chunk.parameter_bytes),
                                         parameter_checksums_[action.chunk])) ||
      (optimizer_read && !same_checksum(offload::checksum(*pool_, optimizer, chunk.optimizer_bytes()),
                                        optimizer_checksums_[action.chunk]))) {
    throw corruption(action.chunk, current_slot_[action.chunk], "states");
  }
  if (place.gradient_extent_bytes > 0) verify_gradient(action.chunk, a.gradient, *pool_);
  const UnitUpdate& update = updates_[action.unit];
  segments_.clear();
  for (std::uint32_t s = chunk.first_segment; s < chunk.first_segment + chunk.segment_count; ++s) {
    const Segment& segment = plan_.layout.segments[s];
    if (!update.present[segment.parameter]) continue;
    segments_.push_back({segment.begin, segment.count, update.scalars[segment.parameter]});
  }
  update_states(action, a);
  if (parameters_read)
    parameter_checksums_[action.chunk] = offload::checksum(*pool_, a.parameter, chunk.parameter_bytes);
  if (optimizer_read)
    optimizer_checksums_[action.chunk] = offload::checksum(*pool_, optimizer, chunk.optimizer_bytes());
}

void Executor::do_accumulate(const Work& work) {
  const Action& action = work.action;
  const ChunkLayout& chunk = plan_.layout.chunks[action.chunk];
  std::byte* const store = gradient_store(action.chunk);
  const std::byte* total = store;
  if (plan_.placement[action.chunk].gradient_extent_bytes > 0) {
    std::byte* const sum = slot_address(SlotKind::gradient, action.slot);
    if (!action.first) {
      verify_gradient(action.chunk, sum, *pool_);
      offload::accumulate_chunk(*pool_, gradient_type_, sum, incoming_gradient(action), chunk.elements, false);
    }
    gradient_checksums_[action.chunk] = offload::checksum(*pool_, sum, chunk.elements * gradient_bytes_);
    total = sum;
  } else if (plan_.placement[action.chunk].gradients == Tier::device) {
    const std::byte* scratch = window_ + action.device_offset + chunk.begin * gradient_bytes_;
    add_to_store(action, scratch);
  } else if (store == nullptr) {
    total = slot_address(SlotKind::gradient, action.slot);
  } else if (!action.first) {
    offload::accumulate_chunk(*pool_, gradient_type_, store, slot_address(SlotKind::gradient, action.slot),
                              chunk.elements, false);
  }
  if (!action.last) return;
  double* sums = block_sums_.data() + chunk.first_block;
  square_sums(action.chunk, total, plan_.placement[action.chunk].gradients == Tier::device);
  if (plan_.timing != Timing::eager) return;
  const std::uint64_t blocks = chunk.elements / kernels::kSumBlock;
  if (std::all_of(sums, sums + blocks, [](double sum) { return std::isfinite(sum); })) return;
  throw UsageError(
      "a gradient in " + chunk_name(action.chunk) +
      " is not finite; with optimizer.timing eager other units have been updated already, so this step is half "
      "applied and only a committed state can go on; to skip such steps use just_in_time or after_backward");
}

void Executor::verify_gradient(std::uint32_t chunk, const std::byte* sum, offload::CpuPool& pool) const {
  const std::uint64_t bytes = plan_.placement[chunk].gradient_extent_bytes;
  if (offload::checksum(pool, sum, bytes) != gradient_checksums_[chunk]) {
    throw corruption(gradient_extent(chunk), 0, "bytes");
  }
}

std::span<const double> Executor::block_sums(std::uint32_t chunk) const {
  const ChunkLayout& layout = plan_.layout.chunks[chunk];
  return {block_sums_.data() + layout.first_block, layout.elements / kernels::kSumBlock};
}

CorruptionError Executor::corruption(std::uint32_t chunk, std::uint32_t slot, const char* what) const {
  io::Transfer where;
  where.chunk = chunk;
  where.slot = slot;
  return CorruptionError(
      "the " + std::string(what) + " of " + chunk_name(chunk) + " (" + std::to_string(steps_) +
      " steps taken) read from " + store_->describe(where) + " are not what was written there; check the drive; " +
      (plan_.durable ? "start again and resume: what is stored is checked then, and where the newest committed step is "
                       "not whole, the one before it goes on"
                     : "the run cannot go on from here"));
}

// --- whole chunks ----------------------------------------------------------------------------------------------------

void Executor::transfer_now(io::Direction direction, std::uint32_t chunk, std::uint32_t slot, std::uint64_t begin_bytes,
                            std::byte* data, std::uint64_t bytes, io::Priority priority) {
  Lock lock(mutex_);
  check(lock);
  if (direction == io::Direction::write) wait_until_copied(lock, chunk, slot);
  Work& work = take_work();
  work.synchronous = true;
  work.transfer.direction = direction;
  work.transfer.priority = priority;
  work.transfer.chunk = chunk;
  work.transfer.slot = slot;
  work.transfer.begin_bytes = begin_bytes;
  work.transfer.data = data;
  work.transfer.bytes = bytes;
  work.transfer.tag = reinterpret_cast<std::uintptr_t>(&work);
  io::Transfer* transfer = &work.transfer;
  store_->submit({&transfer, 1});
  wake();
  // Until it has ended the caller's memory is in use, failure or not.
  changed_.wait(lock, [&] { return work.done; });
  free_works_.push_back(&work);
  wake();
  check(lock);
}

void Executor::load_gradient(std::uint32_t chunk, std::byte* gradient) {
  transfer_now(io::Direction::read, gradient_extent(chunk), 0, 0, gradient,
               plan_.placement[chunk].gradient_extent_bytes);
  verify_gradient(chunk, gradient, *pool_serial_);
}

void Executor::load_chunk(std::uint32_t chunk, std::byte* extent) {
  const ChunkLayout& layout = plan_.layout.chunks[chunk];
  const ChunkPlacement& place = plan_.placement[chunk];
  std::byte* optimizer = extent + layout.parameter_bytes;
  std::uint32_t slot = 0;
  {
    const Lock lock(mutex_);  // a step may be being committed
    slot = current_slot_[chunk];
  }
  if (place.extent_bytes > 0) {
    transfer_now(io::Direction::read, chunk, slot, place.extent_begin_bytes,
                 place.parameters == Tier::nvme ? extent : optimizer, place.extent_bytes);
  }
  if (const std::byte* base = parameter_base(chunk)) copy_from_device(extent, base, layout.parameter_bytes);
  if (const std::byte* base = optimizer_base(chunk)) copy_from_device(optimizer, base, layout.optimizer_bytes());
  if (is_whole(chunk, extent, place.parameters == Tier::nvme, place.optimizer == Tier::nvme)) return;
  fail(std::make_exception_ptr(corruption(chunk, slot, "states")));
  const Lock lock(mutex_);
  check(lock);
}

bool Executor::is_whole(std::uint32_t chunk, const std::byte* extent, bool parameters, bool optimizer) const {
  const ChunkLayout& layout = plan_.layout.chunks[chunk];
  return (!parameters || same_checksum(offload::checksum(*pool_serial_, extent, layout.parameter_bytes),
                                       parameter_checksums_[chunk])) &&
         (!optimizer ||
          same_checksum(offload::checksum(*pool_serial_, extent + layout.parameter_bytes, layout.optimizer_bytes()),
                        optimizer_checksums_[chunk]));
}

std::pair<std::uint64_t, std::uint64_t> Executor::checksums_of(const ChunkLayout& chunk, const std::byte* extent) {
  const auto pool = offload::make_inline_pool();
  return {offload::checksum(*pool, extent, chunk.parameter_bytes),
          offload::checksum(*pool, extent + chunk.parameter_bytes, chunk.optimizer_bytes())};
}

void Executor::save_chunk(std::uint32_t chunk, const std::byte* extent) {
  const ChunkLayout& layout = plan_.layout.chunks[chunk];
  const ChunkPlacement& place = plan_.placement[chunk];
  const std::byte* optimizer = extent + layout.parameter_bytes;
  if (std::byte* base = parameter_base(chunk)) copy_to_device(base, extent, layout.parameter_bytes);
  if (std::byte* base = optimizer_base(chunk)) copy_to_device(base, optimizer, layout.optimizer_bytes());
  std::tie(parameter_checksums_[chunk], optimizer_checksums_[chunk]) = checksums_of(layout, extent);
  if (place.stored_bytes == 0) return;
  const bool whole = plan_.durable || place.parameters == Tier::nvme;
  transfer_now(io::Direction::write, chunk, write_slot(chunk), 0, const_cast<std::byte*>(whole ? extent : optimizer),
               place.stored_bytes);
  current_slot_[chunk] = static_cast<std::uint8_t>(write_slot(chunk));
}

std::string Executor::backend_name() const { return store_ ? std::string(store_->backend_name()) : "none"; }

std::string Executor::backend_reason() const { return store_ ? store_->backend_reason() : "no states on NVMe"; }

}  // namespace ballast::engine
