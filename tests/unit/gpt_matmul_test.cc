// Tiled products against double, and the pool that runs them.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <stdexcept>
#include <thread>
#include <vector>

#include "gpt/matmul.h"
#include "gpt/pool.h"
#include "unit/gpt_reference.h"

namespace ballast::gpt {
namespace {

struct Operands {
  std::vector<float> a, b, bias, before;  // as numbers, rounded to the input type
  std::vector<std::byte> a_bytes, b_bytes;
};

Operands operands(const ProductShape& s, std::uint64_t seed) {
  Operands o;
  const auto make = [&](std::vector<float>& values, std::vector<std::byte>& bytes, std::int64_t count,
                        std::uint64_t stream) {
    values = testing::noise(stream, static_cast<std::size_t>(count));
    bytes.resize(values.size() * scalar_bytes(s.inputs));
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (s.inputs == Scalar::bf16) {
        const std::uint16_t h = testing::bf16_of(values[i]);
        values[i] = testing::float_of_bf16(h);
        std::memcpy(bytes.data() + 2 * i, &h, 2);
      } else {
        std::memcpy(bytes.data() + 4 * i, &values[i], 4);
      }
    }
  };
  make(o.a, o.a_bytes, (s.transpose_a ? s.k : s.m) * s.lda, seed);
  make(o.b, o.b_bytes, (s.transpose_b ? s.n : s.k) * s.ldb, seed + 1);
  o.bias = testing::noise(seed + 2, static_cast<std::size_t>(s.n));
  o.before = testing::noise(seed + 3, static_cast<std::size_t>(s.m * s.ldc));
  return o;
}

std::vector<std::byte> multiply(const ProductShape& s, const Operands& o, int threads) {
  WorkPool pool(threads);
  ProductContext context(threads);
  const TiledProduct product(context, s);
  std::vector<std::byte> c(static_cast<std::size_t>(s.m * s.ldc) * scalar_bytes(s.output));
  if (s.output == Scalar::fp32) std::memcpy(c.data(), o.before.data(), c.size());
  product.run(pool, o.a_bytes.data(), o.b_bytes.data(), s.bias ? o.bias.data() : nullptr, c.data());
  return c;
}

std::vector<ProductShape> shapes(Scalar inputs) {
  std::vector<ProductShape> result;
  const auto add = [&](ProductShape s) {
    s.inputs = inputs;
    result.push_back(s);
  };
  add({.m = 1, .n = 1, .k = 1, .lda = 1, .ldb = 1, .ldc = 1});
  add({.m = 7, .n = 5, .k = 3, .lda = 4, .ldb = 9, .ldc = 6, .bias = true});
  add({.m = 130, .n = 700, .k = 65, .lda = 65, .ldb = 700, .ldc = 700, .bias = true});
  add({.m = 300, .n = 257, .k = 129, .lda = 130, .ldb = 129, .ldc = 288, .transpose_b = true});
  add({.m = 257, .n = 192, .k = 301, .lda = 288, .ldb = 192, .ldc = 192, .transpose_a = true});
  add({.m = 1100, .n = 96, .k = 64, .lda = 1100, .ldb = 96, .ldc = 96, .transpose_a = true, .accumulate = true});
  if (inputs == Scalar::bf16) {
    add({.m = 300, .n = 640, .k = 96, .lda = 96, .ldb = 640, .ldc = 640, .output = Scalar::bf16, .bias = true});
  }
  return result;
}

std::vector<Scalar> supported_inputs() {
  std::vector<Scalar> types = {Scalar::fp32};
  if (ProductContext::bf16_products()) types.push_back(Scalar::bf16);
  return types;
}

TEST(TiledProduct, AgreesWithDoubleForEveryFormAndLeavesWhatIsBesideAlone) {
  for (const Scalar inputs : supported_inputs()) {
    for (const ProductShape& s : shapes(inputs)) {
      const Operands o = operands(s, 100);
      const auto c = multiply(s, o, 2);
      for (std::int64_t i = 0; i < s.m; ++i) {
        for (std::int64_t j = 0; j < s.ldc; ++j) {
          const auto at = static_cast<std::size_t>(i * s.ldc + j);
          float got;
          if (s.output == Scalar::fp32) {
            std::memcpy(&got, c.data() + 4 * at, 4);
          } else {
            std::uint16_t h;
            std::memcpy(&h, c.data() + 2 * at, 2);
            got = testing::float_of_bf16(h);
          }
          if (j >= s.n) {
            ASSERT_EQ(got, s.output == Scalar::fp32 ? o.before[at] : 0.0f);
            continue;
          }
          double want = s.bias ? o.bias[static_cast<std::size_t>(j)] : 0, size = 1;
          if (s.accumulate) want += o.before[at];
          for (std::int64_t k = 0; k < s.k; ++k) {
            const double term =
                static_cast<double>(o.a[static_cast<std::size_t>(s.transpose_a ? k * s.lda + i : i * s.lda + k)]) *
                o.b[static_cast<std::size_t>(s.transpose_b ? j * s.ldb + k : k * s.ldb + j)];
            want += term;
            size += std::abs(term);
          }
          ASSERT_NEAR(got, want, size * 1e-6 + (s.output == Scalar::bf16 ? std::abs(want) * 5e-3 : 0))
              << s.m << " x " << s.n << " x " << s.k << " at " << i << ", " << j;
        }
      }
    }
  }
}

// Products with a long inner dimension and a small result are where a library splits the sum over its threads.
TEST(TiledProduct, HasTheSameBitsForAnyNumberOfThreads) {
  for (const Scalar inputs : supported_inputs()) {
    auto list = shapes(inputs);
    list.push_back(
        {.m = 128, .n = 128, .k = 4096, .lda = 128, .ldb = 128, .ldc = 128, .transpose_a = true, .inputs = inputs});
    list.push_back(
        {.m = 64, .n = 48, .k = 6144, .lda = 64, .ldb = 48, .ldc = 48, .transpose_a = true, .inputs = inputs});
    list.push_back(
        {.m = 384, .n = 1536, .k = 512, .lda = 384, .ldb = 1536, .ldc = 1536, .transpose_a = true, .inputs = inputs});
    list.push_back(
        {.m = 32, .n = 1024, .k = 4096, .lda = 4096, .ldb = 4096, .ldc = 1024, .transpose_b = true, .inputs = inputs});
    for (const ProductShape& s : list) {
      const Operands o = operands(s, 7);
      const auto one = multiply(s, o, 1);
      for (const int threads : {2, 3, 4}) {
        EXPECT_TRUE(multiply(s, o, threads) == one)
            << s.m << " x " << s.n << " x " << s.k << ", " << threads << " threads";
      }
    }
  }
}

TEST(TiledProduct, AProductWorthwhileIsCutSoThatTwoThreadsStayBusy) {
  ProductContext context(1);
  for (const auto& [m, n, k] :
       {std::array<std::int64_t, 3>{128, 1024, 1024}, {128, 4096, 1024}, {1536, 384, 384}, {1024, 1024, 128}}) {
    const TiledProduct product(context, {.m = m, .n = n, .k = k, .lda = k, .ldb = n, .ldc = n, .inputs = Scalar::fp32});
    EXPECT_GE(product.tiles(), 4) << m << " x " << n << " x " << k;
  }
}

TEST(WorkPool, RunsEveryTaskOnceOverManyShortLoops) {
  for (const int threads : {1, 2, 3, 8}) {
    WorkPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    std::vector<std::atomic<int>> hits(100);
    for (int loop = 0; loop < 2000; ++loop) {
      const std::int64_t tasks = loop % 100;
      for (auto& hit : hits) hit.store(0, std::memory_order_relaxed);
      pool.run(tasks, [&](std::int64_t task, int thread) {
        ASSERT_TRUE(thread >= 0 && thread < threads);
        hits[static_cast<std::size_t>(task)].fetch_add(1, std::memory_order_relaxed);
      });
      for (std::int64_t i = 0; i < 100; ++i) ASSERT_EQ(hits[static_cast<std::size_t>(i)].load(), i < tasks ? 1 : 0);
    }
  }
}

TEST(WorkPool, RangesCoverTheWholeWithoutOverlap) {
  WorkPool pool(3);
  for (const std::int64_t total : {0, 1, 10, 64, 65}) {
    std::vector<int> hits(static_cast<std::size_t>(total), 0);
    pool.run_ranges(total, 16, [&](std::int64_t first, std::int64_t last, int) {
      for (std::int64_t i = first; i < last; ++i) ++hits[static_cast<std::size_t>(i)];
    });
    for (const int hit : hits) EXPECT_EQ(hit, 1);
  }
}

TEST(WorkPool, RethrowsAnExceptionAndWorksOn) {
  WorkPool pool(2);
  for (int i = 0; i < 50; ++i) {
    EXPECT_THROW(pool.run(20,
                          [](std::int64_t task, int) {
                            if (task == 11) throw std::runtime_error("task 11");
                          }),
                 std::runtime_error);
    std::atomic<int> done{0};
    pool.run(20, [&](std::int64_t, int) { ++done; });
    EXPECT_EQ(done.load(), 20);
  }
}

TEST(WorkPool, SleepsBetweenLoopsAndWakesForTheNext) {
  WorkPool pool(2);
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::atomic<int> done{0};
    pool.run(4, [&](std::int64_t, int) { ++done; });
    EXPECT_EQ(done.load(), 4);
  }
}

TEST(WorkPool, DefaultThreadsFollowOmpNumThreads) {
  const char* before = std::getenv("OMP_NUM_THREADS");
  const std::string saved = before == nullptr ? "" : before;
  setenv("OMP_NUM_THREADS", "3,2", 1);
  EXPECT_EQ(default_threads(), 3);
  unsetenv("OMP_NUM_THREADS");
  EXPECT_GE(default_threads(), 1);
  if (before != nullptr) setenv("OMP_NUM_THREADS", saved.c_str(), 1);
}

}  // namespace
}  // namespace ballast::gpt
