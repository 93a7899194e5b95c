// The thread that makes steps durable.
// SPDX-License-Identifier: Apache-2.0
#include "durable/step_committer.h"

#include <ballast/base/check.h>

#include <utility>

namespace ballast::engine {

StepCommitter::StepCommitter(Executor& executor, std::shared_ptr<Communicator> communicator, ManifestLog log,
                             std::vector<std::byte> layout, std::optional<std::uint64_t> committed_step)
    : executor_(executor),
      communicator_(std::move(communicator)),
      log_(std::move(log)),
      layout_(std::move(layout)),
      committed_step_(committed_step),
      thread_([this] { run(); }) {}

StepCommitter::~StepCommitter() {
  {
    const Executor::Lock lock(executor_.mutex());
    stopping_ = true;
  }
  executor_.notify_changed();
  thread_.join();
}

void StepCommitter::request(Manifest manifest) {
  BALLAST_CHECK(!request_);
  request_ = std::move(manifest);
  executor_.notify_changed();
}

void StepCommitter::copy_to(CheckpointSave* save) {
  save_ = save;
  if (save_ == nullptr || request_ || committed_step_ != save_->step()) return;
  std::vector<StoredChunk> chunks;
  executor_.stored_chunks(chunks);
  save_->begin(std::move(chunks));
}

void StepCommitter::run() {
  try {
    for (;;) {
      Executor::Lock lock(executor_.mutex());
      ResidentChunks& resident = executor_.resident_chunks();
      const auto all_updated = [&] { return request_ && executor_.updates_written(lock); };
      const auto to_write = [&] {
        return all_updated() ? !resident.empty() : (expected_ || request_) && resident.any_updated();
      };
      const auto complete = [&] { return all_updated() && resident.empty(); };
      executor_.wait_quietly(lock, [&] { return to_write() || complete() || stopping_; });
      if (to_write()) {
        std::uint32_t chunk = 0;
        if (!resident.take(all_updated(), &chunk)) continue;
        lock.unlock();
        executor_.write_resident(chunk);
        continue;
      }
      if (!complete()) return;
      commit(lock);
    }
  } catch (...) {
    executor_.fail(std::current_exception());
  }
}

void StepCommitter::commit(Executor::Lock& lock) {
  Manifest manifest = std::move(*request_);  // stays pending until all is done
  executor_.stored_chunks(manifest.chunks);
  lock.unlock();
  executor_.flush_store();
  log_.publish(layout_, manifest);
  if (communicator_) communicator_->barrier();
  lock.lock();
  executor_.mark_committed(lock);
  committed_step_ = manifest.step;
  request_.reset();
  expected_ = false;
  if (save_ != nullptr && !save_->begun() && save_->step() == manifest.step) save_->begin(std::move(manifest.chunks));
  executor_.notify_changed();
}

}  // namespace ballast::engine
