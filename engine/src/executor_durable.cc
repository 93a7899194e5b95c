// Durable steps and what is copied from them: states written on the way, slots, and the step that is held.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/base/error.h>
#include <ballast/offload/chunk_work.h>

#include "executor.h"

namespace ballast::engine {

void Executor::set_stored_chunks(std::span<const StoredChunk> chunks) {
  for (std::size_t c = 0; c < plan_.layout.chunks.size(); ++c) {
    current_slot_[c] = committed_slot_[c] = chunks[c].slot;
    parameter_checksums_[c] = chunks[c].parameter_checksum;
    optimizer_checksums_[c] = chunks[c].optimizer_checksum;
  }
}

void Executor::restore_chunk(std::uint32_t chunk, std::byte* extent) {
  const ChunkLayout& layout = plan_.layout.chunks[chunk];
  const ChunkPlacement& place = plan_.placement[chunk];
  if (place.stored_bytes == 0) return;
  const std::uint32_t slot = current_slot_[chunk];
  transfer_now(io::Direction::read, chunk, slot, 0, extent, place.stored_bytes);
  if (!is_whole(chunk, extent, true, true)) throw corruption(chunk, slot, "states");
  if (std::byte* base = parameter_base(chunk)) copy_to_device(base, extent, layout.parameter_bytes);
  if (std::byte* base = optimizer_base(chunk)) {
    copy_to_device(base, extent + layout.parameter_bytes, layout.optimizer_bytes());
  }
}

void Executor::write_resident(std::uint32_t chunk) {
  const ChunkLayout& layout = plan_.layout.chunks[chunk];
  const std::uint32_t slot = write_slot(chunk);
  const auto write = [&](std::byte* base, std::uint64_t begin_bytes, std::uint64_t bytes, std::uint64_t* checksum) {
    if (base == nullptr || bytes == 0) return;
    const bool in_slab =
        slab_ && base >= slab_->memory().data() && base < slab_->memory().data() + slab_->memory().size();
    if (!in_slab || reinterpret_cast<std::uintptr_t>(base) % store_->alignment_bytes() != 0) {
      BALLAST_CHECK(staging_ != nullptr && bytes <= plan_.staging_bytes);
      copy_from_device(staging_, base, bytes);
      base = staging_;
    }
    *checksum = offload::checksum(*pool_serial_, base, bytes);
    {
      const Lock lock(mutex_);
      begin_span(Lane::nvme_write);
    }
    transfer_now(io::Direction::write, chunk, slot, begin_bytes, base, bytes, io::Priority::low);
    const Lock lock(mutex_);
    end_span(Lane::nvme_write, bytes);
  };
  write(parameter_base(chunk), 0, layout.parameter_bytes, &parameter_checksums_[chunk]);
  write(optimizer_base(chunk), layout.parameter_bytes, layout.optimizer_bytes(), &optimizer_checksums_[chunk]);
  if (plan_.placement[chunk].extent_bytes > 0) return;  // what lives on NVMe says when the slot is current
  const Lock lock(mutex_);
  current_slot_[chunk] = static_cast<std::uint8_t>(slot);
}

// --- a step that is copied -------------------------------------------------------------------------------------------

void Executor::wait_until_copied(Lock& lock, std::uint32_t chunk, std::uint32_t slot) {
  if (!held_.holds(chunk, slot)) return;
  held_.ask_for(chunk);
  changed_.wait(lock, [&] { return failure_ || !held_.holds(chunk, slot); });
  check(lock);
}

bool Executor::read_held(const Lock&, std::byte* buffer, bool only_asked) {
  std::uint32_t chunk = 0;
  bool asked = false;
  if ((only_asked && !held_.any_asked()) || !held_.next(&chunk, &asked)) return false;
  Work& work = take_work();
  work.copies = true;
  ++copies_reading_;
  io::Transfer* const transfer = &work.transfer;
  transfer->direction = io::Direction::read;
  transfer->priority = asked ? io::Priority::high : io::Priority::low;
  transfer->chunk = chunk;
  transfer->slot = held_.slot(chunk);
  transfer->begin_bytes = 0;
  transfer->data = buffer;
  transfer->bytes = plan_.placement[chunk].stored_bytes;
  transfer->tag = reinterpret_cast<std::uintptr_t>(&work);
  store_->submit({&transfer, 1});
  wake();
  return true;
}

// What an update has read of the held step needs no second reading: the update waits until it has been copied.
bool Executor::hand_to_copier(Work& work) {
  const schedule::Action& action = work.action;
  if (copier_ == nullptr || failure_ || action.task != schedule::Task::read ||
      action.job_kind != schedule::JobKind::update)
    return false;
  if (keeps_elsewhere(action.chunk) || !held_.take(action.chunk, work.transfer.slot)) return false;
  end_task(work);
  ++copied_from_updates_;
  held_is_there(work);
  return true;
}

// Its slot may be written over from here on.
void Executor::held_is_there(Work& work) {
  const std::uint32_t chunk = work.transfer.chunk;
  if (work.transfer.error_number == 0) copied_bytes_ += work.transfer.bytes;
  held_ready_.push_back({chunk, work.transfer.data, work.transfer.bytes, &work});
  if (copier_ != nullptr) copier_->notify();
  held_.let_go(chunk);
  std::erase_if(waiting_for_copies_, [&](Work* waiting) {
    if (waiting->action.chunk != chunk) return false;
    io::Transfer* const write = &waiting->transfer;
    store_->submit({&write, 1});
    return true;
  });
}

bool Executor::take_held(const Lock&, HeldChunk* held) {
  if (held_ready_.empty()) return false;
  *held = held_ready_.front();
  held_ready_.erase(held_ready_.begin());
  held_taken_.push_back(*held);
  const io::Transfer& transfer = held->work->transfer;
  if (transfer.error_number != 0) std::rethrow_exception(transfer_failure(transfer));
  return true;
}

void Executor::give_back(const Lock&, const HeldChunk& held) {
  BALLAST_CHECK(std::erase_if(held_taken_, [&](const HeldChunk& each) { return each.work == held.work; }) == 1);
  if (!held.work->copies) {
    post(*held.work);
    return;
  }
  free_works_.push_back(held.work);
  wake();
}

void Executor::let_go_all(Lock& lock) {
  copier_ = nullptr;
  changed_.wait(lock, [&] { return copies_reading_ == 0; });
  held_.let_go_all();
  for (Work* const waiting : waiting_for_copies_) {
    io::Transfer* const write = &waiting->transfer;
    store_->submit({&write, 1});
  }
  waiting_for_copies_.clear();
  held_taken_.insert(held_taken_.end(), held_ready_.begin(), held_ready_.end());
  held_ready_.clear();
  while (!held_taken_.empty()) give_back(lock, HeldChunk(held_taken_.back()));
  changed_.notify_all();
  wake();
}

void Executor::verify_copy(std::uint32_t chunk, const StoredChunk& stored, const std::byte* extent) const {
  const ChunkLayout& layout = plan_.layout.chunks[chunk];
  if (offload::checksum(*pool_serial_, extent, layout.parameter_bytes) == stored.parameter_checksum &&
      offload::checksum(*pool_serial_, extent + layout.parameter_bytes, layout.optimizer_bytes()) ==
          stored.optimizer_checksum) {
    return;
  }
  throw corruption(chunk, stored.slot, "states");
}

std::span<std::byte> Executor::copy_memory() const { return {copy_slots_, plan_.copy_slots * plan_.copy_slot_bytes}; }

std::vector<std::byte*> Executor::copy_buffers() const {
  std::vector<std::byte*> buffers;
  for (std::uint32_t i = 0; i < plan_.copy_slots; ++i) buffers.push_back(copy_slots_ + i * plan_.copy_slot_bytes);
  return buffers;
}

void Executor::stored_chunks(std::vector<StoredChunk>& chunks) const {
  chunks.resize(current_slot_.size());
  for (std::size_t c = 0; c < chunks.size(); ++c) {
    chunks[c] = {current_slot_[c], parameter_checksums_[c], optimizer_checksums_[c]};
  }
}

}  // namespace ballast::engine
