// StepCommitter: makes steps durable while training goes on. A step is requested when its updates are decided; once
// they are done and written, the store is flushed, a manifest published, and, with several ranks, all others waited
// for. Until then nothing of the step after it may be written: the engine waits before it decides that one.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/communicator.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "durable/checkpoint_save.h"
#include "durable/manifest.h"
#include "executor.h"

namespace ballast::engine {

class StepCommitter {
 public:
  // The executor outlives it. `communicator`: a duplicate of its own, used on its thread alone; null where there is one
  // rank. committed_step: what the store holds already, where it does.
  StepCommitter(Executor& executor, std::shared_ptr<Communicator> communicator, ManifestLog log,
                std::vector<std::byte> layout, std::optional<std::uint64_t> committed_step);
  // What is under way is given up where its updates are not done.
  ~StepCommitter();
  StepCommitter(const StepCommitter&) = delete;
  StepCommitter& operator=(const StepCommitter&) = delete;

  // All under the executor's mutex; the thread is woken by its `changed`.
  // States that live elsewhere are written as their updates end: the step that is running will be committed.
  void expect() { expected_ = true; }
  // The manifest but for its chunks, of a step that has been decided just now. None may be pending.
  void request(Manifest manifest);
  bool pending() const { return request_.has_value(); }
  // That save begins once its step is committed, at once where it is. Null: none. It outlives its being set here.
  void copy_to(CheckpointSave* save);
  bool busy() const { return pending() || (expected_ && executor_.resident_chunks().any_updated()); }
  std::optional<std::uint64_t> committed_step() const { return committed_step_; }

 private:
  void run();
  void commit(Executor::Lock& lock);

  Executor& executor_;
  const std::shared_ptr<Communicator> communicator_;
  ManifestLog log_;
  const std::vector<std::byte> layout_;
  bool expected_ = false;
  bool stopping_ = false;
  std::optional<Manifest> request_;
  std::optional<std::uint64_t> committed_step_;
  CheckpointSave* save_ = nullptr;
  std::thread thread_;
};

}  // namespace ballast::engine
