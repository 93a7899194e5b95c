// What every CpuPool promises: fixed pieces, each once, all done at return, and no deadlock with loops around or
// inside. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <oneapi/tbb/global_control.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "ballast/base/error.h"
#include "ballast/offload/cpu_pool.h"
#include "contract/outer_loop.h"

namespace ballast::offload {
namespace {

// Real threads for the widest pool, also where there are fewer CPUs.
const tbb::global_control kWide(tbb::global_control::max_allowed_parallelism, 8);

// 0 threads: the inline pool.
class CpuPoolContract : public testing::TestWithParam<int> {
 protected:
  static std::unique_ptr<CpuPool> make() { return GetParam() == 0 ? make_inline_pool() : make_tbb_pool(GetParam()); }
};

TEST_P(CpuPoolContract, CoversTheRangeOnceInPiecesCutAtMultiplesOfTheGrain) {
  const auto pool = make();
  for (const std::size_t grain : {std::size_t{1}, std::size_t{7}, std::size_t{1000}}) {
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, grain - 1, grain, grain + 1, 10 * grain + 3}) {
      std::mutex mutex;
      std::vector<std::pair<std::size_t, std::size_t>> pieces;
      parallel_for(*pool, count, grain, [&](std::size_t begin, std::size_t end) {
        const std::lock_guard lock(mutex);
        pieces.emplace_back(begin, end);
      });
      std::sort(pieces.begin(), pieces.end());
      std::size_t expected = 0;
      for (const auto& [begin, end] : pieces) {
        EXPECT_EQ(begin, expected);
        EXPECT_EQ(begin % grain, 0u);
        EXPECT_EQ(end, std::min(begin + grain, count));
        expected = end;
      }
      EXPECT_EQ(expected, count);
      EXPECT_EQ(pieces.size(), (count + grain - 1) / grain) << "count " << count << ", grain " << grain;
    }
  }
}

TEST_P(CpuPoolContract, AGrainAboveTheCountIsOnePiece) {
  const auto pool = make();
  int calls = 0;
  parallel_for(*pool, 5, SIZE_MAX, [&](std::size_t begin, std::size_t end) {
    ++calls;
    EXPECT_EQ(begin, 0u);
    EXPECT_EQ(end, 5u);
  });
  EXPECT_EQ(calls, 1);
}

TEST_P(CpuPoolContract, WhatBodiesWroteIsVisibleAtReturnAndToTheNextLoop) {
  const auto pool = make();
  std::vector<int> values(5000, 0);
  for (int round = 1; round <= 200; ++round) {
    parallel_for(*pool, values.size(), 64, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) ++values[i];
    });
    ASSERT_EQ(std::count(values.begin(), values.end(), round), static_cast<std::ptrdiff_t>(values.size()));
  }
}

TEST_P(CpuPoolContract, ALoopInsideABodyOfTheSamePoolEnds) {
  const auto pool = make();
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> sum{0};
    parallel_for(*pool, 8, 1, [&](std::size_t, std::size_t) {
      parallel_for(*pool, 8, 1, [&](std::size_t, std::size_t) { sum.fetch_add(1, std::memory_order_relaxed); });
    });
    ASSERT_EQ(sum.load(), 64);
  }
}

// A thread that waits for its inner loop must not take an outer iteration, which would lock the same mutex again.
TEST_P(CpuPoolContract, InsideTheCallersOwnLoopUnderALockItEndsWithTheRightResult) {
  for (const int outer_threads : {1, 2, 8}) {
    const auto pool = make();
    std::mutex mutex;
    for (int round = 0; round < 350; ++round) {
      std::vector<int> values(64 * 16, 0);
      outer_loop(outer_threads, 16, [&] {
        const std::lock_guard lock(mutex);
        parallel_for(*pool, values.size(), 64, [&](std::size_t begin, std::size_t end) {
          for (std::size_t i = begin; i < end; ++i) ++values[i];
        });
      });
      ASSERT_EQ(std::count(values.begin(), values.end(), 16), static_cast<std::ptrdiff_t>(values.size()));
    }
  }
}

TEST_P(CpuPoolContract, WithGlobalParallelismOfOneItEnds) {
  const auto before = make();
  const tbb::global_control one(tbb::global_control::max_allowed_parallelism, 1);
  const auto after = make();
  EXPECT_EQ(after->threads(), 1);
  for (int round = 0; round < 100; ++round) {
    std::atomic<int> sum{0};
    for (CpuPool* const pool : {before.get(), after.get()}) {
      parallel_for(*pool, 100, 1, [&](std::size_t, std::size_t) { sum.fetch_add(1, std::memory_order_relaxed); });
    }
    ASSERT_EQ(sum.load(), 200);
  }
}

TEST_P(CpuPoolContract, TwoThreadsWithAPoolEachDoNotDisturbOneAnother) {
  std::vector<std::thread> callers;
  std::atomic<int> right{0};
  for (int caller = 0; caller < 2; ++caller) {
    callers.emplace_back([&] {
      const auto pool = make();
      for (int round = 0; round < 300; ++round) {
        std::atomic<int> sum{0};
        parallel_for(*pool, 40, 3, [&](std::size_t begin, std::size_t end) {
          sum.fetch_add(static_cast<int>(end - begin), std::memory_order_relaxed);
        });
        if (sum.load() == 40) right.fetch_add(1);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(right.load(), 600);
}

TEST_P(CpuPoolContract, NeverMoreThreadsThanItSaysAreInBodiesAtOnce) {
  const auto pool = make();
  std::atomic<int> inside{0};
  std::atomic<int> inside_max{0};
  parallel_for(*pool, 400, 1, [&](std::size_t, std::size_t) {
    const int now = inside.fetch_add(1) + 1;
    int seen = inside_max.load();
    while (now > seen && !inside_max.compare_exchange_weak(seen, now)) {
    }
    std::this_thread::yield();
    inside.fetch_sub(1);
  });
  EXPECT_GE(inside_max.load(), 1);
  EXPECT_LE(inside_max.load(), pool->threads());
  EXPECT_EQ(pool->threads(), std::max(GetParam(), 1));
}

TEST_P(CpuPoolContract, AForkedChildCanLetGoOfIt) {
  auto pool = make();
  parallel_for(*pool, 100, 1, [](std::size_t, std::size_t) {});
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);  // ends a child that hangs
    pool.reset();
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}

INSTANTIATE_TEST_SUITE_P(Pools, CpuPoolContract, testing::Values(0, 1, 2, 3, 8), [](const auto& chosen) {
  return chosen.param == 0 ? std::string("Inline") : "Tbb" + std::to_string(chosen.param);
});

TEST(CpuPool, APoolWithoutThreadsIsRefused) {
  EXPECT_THROW(make_tbb_pool(0), ConfigError);
  EXPECT_THROW(make_tbb_pool(-3), ConfigError);
}

TEST(CpuPool, AWiderPoolUsesSeveralThreads) {
  const auto pool = make_tbb_pool(2);
  std::mutex mutex;
  std::vector<std::thread::id> ids;
  // Each body waits for company, for a while, so that one fast thread does not do it all.
  for (int round = 0; round < 50 && ids.size() < 2; ++round) {
    std::atomic<int> arrived{0};
    parallel_for(*pool, 2, 1, [&](std::size_t, std::size_t) {
      arrived.fetch_add(1);
      for (int spin = 0; spin < 2000 && arrived.load() < 2; ++spin) std::this_thread::yield();
      const std::lock_guard lock(mutex);
      if (std::find(ids.begin(), ids.end(), std::this_thread::get_id()) == ids.end()) {
        ids.push_back(std::this_thread::get_id());
      }
    });
  }
  EXPECT_EQ(ids.size(), 2u);
}

}  // namespace
}  // namespace ballast::offload
