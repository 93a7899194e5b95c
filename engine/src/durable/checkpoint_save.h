// CheckpointSave: one checkpoint on its way. Once its step is committed the executor holds that step's slots, and a
// thread copies them to the checkpoint's folder while training goes on; then it is put in place.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/wake_event.h>
#include <ballast/io/chunk_store.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "durable/checkpoints.h"
#include "durable/manifest.h"
#include "executor.h"

namespace ballast::engine {

// What this rank does of it.
struct CheckpointPart {
  StoredLayout layout;          // but for where the chunks lie in the checkpoint's file
  Manifest manifest;            // but for its chunks
  bool holds = true;            // false: other ranks write all of it
  io::ChunkStoreOptions store;  // of the checkpoint's own
  // The first rank's: the folder, in place of which nothing is put before all ranks' parts are durable.
  std::unique_ptr<CheckpointFolder> folder;
  std::size_t keep = 0;
  bool alone = true;  // otherwise it is put in place by publish(), once all ranks have agreed
};

class CheckpointSave {
 public:
  // The executor outlives it.
  CheckpointSave(Executor& executor, CheckpointPart part);
  ~CheckpointSave();  // gives up what is not complete
  CheckpointSave(const CheckpointSave&) = delete;
  CheckpointSave& operator=(const CheckpointSave&) = delete;

  std::uint64_t step() const { return part_.manifest.step; }

  // All under the executor's mutex, whose `changed` tells of every change.
  // Its step has been committed, in these slots; nothing later has been written yet.
  void begin(std::vector<StoredChunk> chunks);
  void publish();  // all ranks' parts are durable
  bool begun() const { return state_ != State::waiting; }
  bool running() const { return state_ == State::copying || state_ == State::publishing; }
  bool copied() const { return state_ >= State::copied && !failure_; }  // this rank's part is durable
  bool published() const { return state_ == State::published && !failure_; }
  bool ended() const { return state_ == State::published || failure_; }
  // IoError, CorruptionError, or what has failed the engine.
  const std::exception_ptr& failure() const { return failure_; }
  bool put_in_place() const { return put_in_place_; }  // even where an older one could not be removed then

 private:
  enum class State : std::uint8_t { waiting, copying, copied, publishing, published };
  void run();
  bool copy();  // false: to be given up
  bool reach(State state);

  Executor& executor_;
  CheckpointPart part_;
  State state_ = State::waiting;
  bool stopping_ = false;
  bool publish_asked_ = false;
  bool put_in_place_ = false;
  std::exception_ptr failure_;
  base::WakeEvent wake_;  // the copier's
  std::thread thread_;
};

}  // namespace ballast::engine
