// ChunkCopier: writes the chunks of the step that an executor holds to a store, from wherever they turn up in memory:
// what updates read, and what it has read itself into buffers of its own.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/wake_event.h>
#include <ballast/io/chunk_store.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "durable/manifest.h"
#include "executor.h"

namespace ballast::engine {

// One thread. All it is given outlives it; the store, which rings `wake`, is used by nobody else meanwhile.
class ChunkCopier {
 public:
  ChunkCopier(Executor& executor, io::ChunkStore& store, base::WakeEvent& wake, std::span<const StoredChunk> chunks);
  // Waits for the writes that are under way. What it has not given back, Executor::let_go_all() takes.
  ~ChunkCopier();
  ChunkCopier(const ChunkCopier&) = delete;
  ChunkCopier& operator=(const ChunkCopier&) = delete;

  // Until all are written; false: `stopping`, which is asked under the executor's mutex, said so. Throws IoError,
  // CorruptionError where a chunk is not what was committed, or what has failed the engine.
  bool copy_all(const std::function<bool()>& stopping);

 private:
  struct Copy {
    Executor::HeldChunk held;
    io::Transfer write;
    bool busy = false;
  };
  void take_ready(const Executor::Lock& lock);
  void write(Copy& copy);
  bool collect_written();

  Executor& executor_;
  io::ChunkStore& store_;
  base::WakeEvent& wake_;
  const std::span<const StoredChunk> chunks_;
  const std::vector<std::byte*> buffers_;
  std::vector<std::byte*> free_buffers_;
  std::vector<Copy> copies_;
  std::vector<Copy*> free_, begun_;
  std::size_t reading_ = 0;
  std::size_t left_;
};

}  // namespace ballast::engine
