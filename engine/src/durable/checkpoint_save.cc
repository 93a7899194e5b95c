// The thread that copies a committed step.
// SPDX-License-Identifier: Apache-2.0
#include "durable/checkpoint_save.h"

#include <ballast/base/check.h>

#include <utility>

#include "durable/chunk_copier.h"

namespace ballast::engine {

CheckpointSave::CheckpointSave(Executor& executor, CheckpointPart part)
    : executor_(executor), part_(std::move(part)), thread_([this] { run(); }) {}

CheckpointSave::~CheckpointSave() {
  {
    const Executor::Lock lock(executor_.mutex());
    stopping_ = true;
  }
  executor_.notify_changed();
  wake_.notify();
  thread_.join();
}

void CheckpointSave::begin(std::vector<StoredChunk> chunks) {
  BALLAST_CHECK(state_ == State::waiting);
  if (failure_) return;
  part_.manifest.chunks = std::move(chunks);
  if (part_.holds) executor_.hold(part_.manifest.chunks, wake_);
  state_ = State::copying;
  executor_.notify_changed();
}

void CheckpointSave::publish() {
  publish_asked_ = true;
  executor_.notify_changed();
}

// False: it is to be given up.
bool CheckpointSave::reach(State state) {
  const Executor::Lock lock(executor_.mutex());
  if (stopping_) return false;
  state_ = state;
  executor_.notify_changed();
  return true;
}

void CheckpointSave::run() {
  std::exception_ptr failure;
  bool gone_on = false;
  try {
    {
      Executor::Lock lock(executor_.mutex());
      executor_.wait_quietly(lock, [&] { return stopping_ || state_ == State::copying; });
      gone_on = !stopping_;
    }
    gone_on = gone_on && copy() && reach(State::copied);
    if (gone_on) {
      Executor::Lock lock(executor_.mutex());
      executor_.wait_quietly(lock, [&] { return stopping_ || part_.alone || publish_asked_; });
      gone_on = !stopping_;
      if (gone_on) state_ = State::publishing;
    }
    if (gone_on && part_.folder) {
      part_.folder->publish();
      {
        const Executor::Lock lock(executor_.mutex());
        put_in_place_ = true;
      }
      part_.folder->prune(part_.keep);
    }
  } catch (...) {
    failure = std::current_exception();
  }
  // Others may still be writing into the folder of a failed one: it goes with this object then.
  if (part_.alone || put_in_place_) part_.folder.reset();
  Executor::Lock lock(executor_.mutex());
  executor_.let_go_all(lock);
  if (failure) failure_ = failure;
  if (!failure && gone_on) state_ = State::published;
  executor_.notify_changed();
}

bool CheckpointSave::copy() {
  if (!part_.holds) return true;
  const std::string folder = part_.store.paths.front();
  const std::uint32_t rank = part_.store.rank;
  {
    part_.store.storage.wake = &wake_;
    io::ChunkStore store(std::move(part_.store));
    std::string unregistered;  // works all the same
    if (!executor_.copy_memory().empty()) store.register_memory(executor_.copy_memory(), &unregistered);
    ChunkCopier copier(executor_, store, wake_, part_.manifest.chunks);
    if (!copier.copy_all([this] { return stopping_; })) return false;
    for (StoredChunk& chunk : part_.manifest.chunks) chunk.slot = 0;
    for (std::uint32_t c = 0; c < part_.layout.chunks.size(); ++c) {
      part_.layout.chunks[c].offset_bytes = store.offset_bytes(c);
      part_.layout.chunks[c].slot_bytes = store.slot_bytes(c);
    }
    store.flush();
  }
  ManifestLog(io::make_small_files(folder), rank).publish(encode_layout(part_.layout), part_.manifest);
  return true;
}

}  // namespace ballast::engine
