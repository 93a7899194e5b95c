// The pools: an arena of oneTBB, and the caller's own thread.
// SPDX-License-Identifier: Apache-2.0
#include "ballast/offload/cpu_pool.h"

#include <algorithm>
#include <string>
#include <utility>

#include "ballast/base/check.h"
#include "ballast/base/error.h"
#include "tbb_arena.h"
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
    body(context, begin, begin + std::min(grain, count - begin));
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
  TbbPool(int threads, std::vector<int> keep_on) : threads_(threads), arena_(threads, std::move(keep_on)) {}

  void parallel_for(std::size_t count, std::size_t grain, Body body, void* context) override {
    BALLAST_CHECK(grain != 0);
    Pieces pieces{count, grain, body, context};
    if (pieces.number() <= 1) {
      if (count != 0) pieces.run(0);
      return;
    }
    // The loop's address stands for its order: released before it, taken by each body, released by each, taken after.
    tsan_release(&pieces);
    arena_.run(
        pieces.number(),
        [](void* loop, std::size_t piece) {
          tsan_acquire(loop);
          static_cast<const Pieces*>(loop)->run(piece);
          tsan_release(loop);
        },
        &pieces);
    tsan_acquire(&pieces);
  }

  int threads() const override { return threads_; }

 private:
  int threads_;
  TbbArena arena_;
};

}  // namespace

std::unique_ptr<CpuPool> make_tbb_pool(int threads, std::vector<int> keep_on) {
  if (threads < 1) {
    throw ConfigError("a CPU pool needs at least one thread; " + std::to_string(threads) + " were asked for");
  }
  // A wider arena than TBB may fill makes it print a warning.
  const int width = std::min(threads, TbbArena::allowed_threads());
  // One thread is the caller's own: nothing to hand over, nothing to wait for.
  if (width == 1) return make_inline_pool();
  return std::make_unique<TbbPool>(width, std::move(keep_on));
}

std::unique_ptr<CpuPool> make_inline_pool() { return std::make_unique<InlinePool>(); }

}  // namespace ballast::offload
