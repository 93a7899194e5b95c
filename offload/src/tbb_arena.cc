// The loop itself. Compiled without thread instrumentation (see CMakeLists.txt): TBB's library has none, so that its
// headers' half alone would be reported in every loop; the order it makes is told by the caller, in cpu_pool.cc.
// SPDX-License-Identifier: Apache-2.0
#include "tbb_arena.h"

#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>
#include <oneapi/tbb/task_scheduler_observer.h>
#include <sched.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <utility>

#include "ballast/offload/machine_share.h"

namespace ballast::offload {

namespace {

// TBB's threads work for many arenas: each stays on this one's CPUs only while it is here.
class Keeper final : public tbb::task_scheduler_observer {
 public:
  Keeper(tbb::task_arena& arena, std::vector<int> cpus) : task_scheduler_observer(arena), cpus_(std::move(cpus)) {
    if (!cpus_.empty()) observe(true);
  }
  ~Keeper() override { observe(false); }

  void on_scheduler_entry(bool worker) override {
    if (!worker) return;
    Before& mine = before();
    mine.known = sched_getaffinity(0, sizeof mine.mask, &mine.mask) == 0;  // beyond 1024 CPUs: left where it is
    if (mine.known) mine.known = keep_thread_on(cpus_);
  }
  void on_scheduler_exit(bool worker) override {
    if (worker && before().known) sched_setaffinity(0, sizeof before().mask, &before().mask);
  }

 private:
  struct Before {
    cpu_set_t mask;
    bool known = false;
  };
  static Before& before() {
    static thread_local Before mine;
    return mine;
  }
  std::vector<int> cpus_;
};

}  // namespace

struct TbbArena::Implementation {
  Implementation(int threads, std::vector<int> keep_on)
      : arena(threads, 1), keeper(arena, std::move(keep_on)), owner(getpid()) {}
  tbb::task_arena arena;
  Keeper keeper;
  pid_t owner;
};

int TbbArena::allowed_threads() {
  const std::size_t allowed = tbb::global_control::active_value(tbb::global_control::max_allowed_parallelism);
  return static_cast<int>(std::clamp<std::size_t>(allowed, 1, INT_MAX));
}

TbbArena::TbbArena(int threads, std::vector<int> keep_on)
    : implementation_(std::make_unique<Implementation>(threads, std::move(keep_on))) {}

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
