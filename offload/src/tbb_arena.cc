// The loop itself. Compiled without thread instrumentation (see CMakeLists.txt): TBB's library has none, so that its
// headers' half alone would be reported in every loop; the order it makes is told by the caller, in cpu_pool.cc.
// SPDX-License-Identifier: Apache-2.0
#include "tbb_arena.h"

#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

namespace ballast::offload {

struct TbbArena::Implementation {
  explicit Implementation(int threads) : arena(threads, 1), owner(getpid()) {}
  tbb::task_arena arena;
  pid_t owner;
};

int TbbArena::allowed_threads() {
  const std::size_t allowed = tbb::global_control::active_value(tbb::global_control::max_allowed_parallelism);
  return static_cast<int>(std::clamp<std::size_t>(allowed, 1, INT_MAX));
}

TbbArena::TbbArena(int threads) : implementation_(std::make_unique<Implementation>(threads)) {}

TbbArena::~TbbArena() {
  // A forked child has none of the arena's threads, and their locks may be held for ever.
  if (implementation_->owner != getpid()) static_cast<void>(implementation_.release());
}

void TbbArena::run(std::size_t pieces, void (*function)(void* context, std::size_t piece), void* context) {
  implementation_->arena.execute([=] {
    // Isolated, so that a thread waiting for this loop takes no task of a loop around it.
    tbb::this_task_arena::isolate([=] {
      tbb::parallel_for(
          tbb::blocked_range<std::size_t>(0, pieces, 1),
          [=](const tbb::blocked_range<std::size_t>& range) noexcept {
            for (std::size_t piece = range.begin(); piece < range.end(); ++piece) function(context, piece);
          },
          tbb::simple_partitioner());
    });
  });
}

}  // namespace ballast::offload
