// The pools: an arena of oneTBB, and the caller's own thread.
// SPDX-License-Identifier: Apache-2.0
#include "ballast/offload/cpu_pool.h"

#include <oneapi/tbb/blocked_range.h>
#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <string>

#include "ballast/base/check.h"
#include "ballast/base/error.h"
#include "tsan_annotations.h"

namespace ballast::offload {
namespace {

// The pieces [k * grain, (k + 1) * grain) of a loop. The last one may be shorter.
struct Pieces {
  std::size_t count;
  std::size_t grain;
  CpuPool::Body body;
  void* context;

  std::size_t number() const { return count / grain + (count % grain != 0 ? 1 : 0); }
  void run(std::size_t piece) const noexcept {
    const std::size_t begin = piece * grain;
    body(context, begin, std::min(grain, count - begin) + begin);
  }
};

class InlinePool final : public CpuPool {
 public:
  void parallel_for(std::size_t count, std::size_t grain, Body body, void* context) override {
    BALLAST_CHECK(grain != 0);
    const Pieces pieces{count, grain, body, context};
    for (std::size_t piece = 0; piece < pieces.number(); ++piece) pieces.run(piece);
  }
  int threads() const override { return 1; }
};

class TbbPool final : public CpuPool {
 public:
  explicit TbbPool(int threads) : threads_(threads), arena_(threads, 1) {}

  void parallel_for(std::size_t count, std::size_t grain, Body body, void* context) override {
    BALLAST_CHECK(grain != 0);
    const Pieces pieces{count, grain, body, context};
    if (pieces.number() <= 1) {
      if (count != 0) pieces.run(0);
      return;
    }
    // The address stands for this loop: released before it, taken by each body, released by each, taken after it.
    char order = 0;
    tsan_release(&order);
    const Loop loop{&pieces, &order};
    arena_.execute([&loop] {
      // Isolated, so that a thread waiting for this loop takes no task of a loop around it.
      tbb::this_task_arena::isolate([&loop] {
        tbb::parallel_for(tbb::blocked_range<std::size_t>(0, loop.pieces->number(), 1), loop,
                          tbb::simple_partitioner());
      });
    });
    tsan_acquire(&order);
  }

  int threads() const override { return threads_; }

 private:
  struct Loop {
    const Pieces* pieces;
    char* order;
    void operator()(const tbb::blocked_range<std::size_t>& range) const noexcept {
      tsan_acquire(order);
      for (std::size_t piece = range.begin(); piece < range.end(); ++piece) pieces->run(piece);
      tsan_release(order);
    }
  };

  int threads_;
  tbb::task_arena arena_;
};

}  // namespace

std::unique_ptr<CpuPool> make_tbb_pool(int threads) {
  if (threads < 1)
    throw ConfigError("a CPU pool needs at least one thread; " + std::to_string(threads) + " were asked for");
  // TBB gives a process no more threads than this; asking for more makes it print a warning.
  const std::size_t allowed = tbb::global_control::active_value(tbb::global_control::max_allowed_parallelism);
  const int width = static_cast<int>(std::min(static_cast<std::size_t>(threads), allowed));
  // One thread is the caller's own: nothing to hand over, nothing to wait for.
  if (width <= 1) return make_inline_pool();
  return std::make_unique<TbbPool>(width);
}

std::unique_ptr<CpuPool> make_inline_pool() { return std::make_unique<InlinePool>(); }

}  // namespace ballast::offload
