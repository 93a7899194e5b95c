// The copier's loop: one thread that waits for reads, for updates and for its writes at once.
// SPDX-License-Identifier: Apache-2.0
#include "durable/chunk_copier.h"

#include <ballast/base/error.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

namespace ballast::engine {

ChunkCopier::ChunkCopier(Executor& executor, io::ChunkStore& store, base::WakeEvent& wake,
                         std::span<const StoredChunk> chunks)
    : executor_(executor),
      store_(store),
      wake_(wake),
      chunks_(chunks),
      buffers_(executor.copy_buffers()),
      free_buffers_(buffers_),
      copies_(executor.most_held_chunks()),
      left_(chunks.size()) {
  begun_.reserve(copies_.size());
  for (Copy& copy : copies_) free_.push_back(&copy);
}

ChunkCopier::~ChunkCopier() {
  std::array<io::Transfer*, 8> finished{};
  while (std::any_of(copies_.begin(), copies_.end(), [](const Copy& copy) { return copy.busy; })) {
    const std::size_t count = store_.poll(finished, true);
    for (std::size_t i = 0; i < count; ++i) reinterpret_cast<Copy*>(finished[i]->tag)->busy = false;
  }
}

bool ChunkCopier::copy_all(const std::function<bool()>& stopping) {
  while (left_ > 0) {
    {
      const Executor::Lock lock(executor_.mutex());
      if (stopping()) return false;
      executor_.check(lock);
      take_ready(lock);
      // By itself it reads one at a time, at low priority, and leaves the drive to the steps.
      while (!free_buffers_.empty() && executor_.read_held(lock, free_buffers_.back(), reading_ > 0)) {
        free_buffers_.pop_back();
        ++reading_;
      }
    }
    for (Copy* copy : begun_) write(*copy);
    const bool moved = !begun_.empty();
    begun_.clear();
    if (!collect_written() && !moved) wake_.wait(-1);
  }
  return true;
}

void ChunkCopier::take_ready(const Executor::Lock& lock) {
  for (Executor::HeldChunk held; executor_.take_held(lock, &held);) {
    Copy& copy = *free_.back();
    free_.pop_back();
    copy.held = held;
    begun_.push_back(&copy);
    reading_ -= std::count(buffers_.begin(), buffers_.end(), held.states);
  }
}

// Checked while it is being written: a checkpoint with a wrong chunk is not put in place.
void ChunkCopier::write(Copy& copy) {
  const std::uint32_t chunk = copy.held.chunk;
  copy.write = {};
  copy.write.direction = io::Direction::write;
  copy.write.priority = io::Priority::low;
  copy.write.chunk = chunk;
  copy.write.data = copy.held.states;
  copy.write.bytes = copy.held.bytes;
  copy.write.tag = reinterpret_cast<std::uintptr_t>(&copy);
  io::Transfer* const one = &copy.write;
  store_.submit({&one, 1});
  copy.busy = true;
  executor_.verify_copy(chunk, chunks_[chunk], copy.held.states);
}

bool ChunkCopier::collect_written() {
  std::array<io::Transfer*, 8> finished{};
  const std::size_t count = store_.poll(finished, false);
  if (count == 0) return false;
  const Executor::Lock lock(executor_.mutex());
  const io::Transfer* failed = nullptr;
  for (std::size_t i = 0; i < count; ++i) {
    Copy& copy = *reinterpret_cast<Copy*>(finished[i]->tag);
    copy.busy = false;
    if (copy.write.error_number != 0) {
      failed = &copy.write;
      continue;
    }
    if (std::count(buffers_.begin(), buffers_.end(), copy.held.states) > 0) free_buffers_.push_back(copy.held.states);
    executor_.give_back(lock, copy.held);
    free_.push_back(&copy);
    --left_;
  }
  if (failed != nullptr) {
    throw IoError("writing " + store_.describe(*failed) + " failed: " + std::strerror(failed->error_number));
  }
  return true;
}

}  // namespace ballast::engine
