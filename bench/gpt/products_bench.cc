// Measures the trainer's matrix products against a bare oneDNN loop of the same shapes on oneDNN's own threads,
// alternating the two shape by shape (ABBA), and prints the ratio of their rates over one block's forward and backward.
//
//   ballast_gpt_products configs/models/gpt-303m.json [tokens = 128] [pairs = 20]
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dnnl.hpp>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "matmul.h"
#include "model.h"
#include "pool.h"

namespace {

using namespace ballast::gpt;  // NOLINT: this program is about nothing else

struct Case {
  const char* name;
  int times;  // per block and micro-batch: forward products run twice, for backward computes them again
  ProductShape shape;
};

std::vector<Case> cases_of(const GptShape& model, std::int64_t m) {
  const std::int64_t c = model.width;
  const Scalar type = ProductContext::bf16_products() ? Scalar::bf16 : Scalar::fp32;
  std::vector<Case> cases;
  const auto linear = [&](const char* name, std::int64_t in, std::int64_t out, int forward, Scalar output,
                          Scalar back) {
    cases.push_back({name,
                     forward,
                     {.m = m, .n = out, .k = in, .lda = in, .ldb = out, .ldc = out, .inputs = type, .output = output}});
    cases.push_back({name,
                     1,
                     {.m = m,
                      .n = in,
                      .k = out,
                      .lda = out,
                      .ldb = out,
                      .ldc = in,
                      .transpose_b = true,
                      .inputs = type,
                      .output = back}});
    cases.push_back(
        {name, 1, {.m = in, .n = out, .k = m, .lda = in, .ldb = out, .ldc = out, .transpose_a = true, .inputs = type}});
  };
  linear("attn.c_attn", c, 3 * c, 2, type, Scalar::fp32);
  linear("attn.c_proj", c, c, 2, Scalar::fp32, type);
  linear("mlp.c_fc", c, 4 * c, 2, type, Scalar::fp32);
  linear("mlp.c_proj", 4 * c, c, 1, Scalar::fp32, type);
  return cases;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

template <class Work>
double seconds_of(Work&& work) {
  constexpr int kRuns = 4;
  // Threads of either side may still spin after their last loop; let them fall asleep.
  std::this_thread::sleep_for(std::chrono::milliseconds(8));
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kRuns; ++i) work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / kRuns;
}

int run(const std::string& path, std::int64_t tokens, int pairs) {
  const GptShape model = GptShape::from_file(path);
  WorkPool pool(default_threads());
  ProductContext context(pool.threads());
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  double ours_total = 0, bare_total = 0;
  std::printf("%s, %lld tokens, %d threads, %s; medians of %d pairs\n", path.c_str(), static_cast<long long>(tokens),
              pool.threads(), ProductContext::isa_name().c_str(), pairs);
  std::printf("%-12s %24s %14s %14s %7s\n", "", "m x n x k", "bare GFLOP/s", "ours GFLOP/s", "ratio");
  for (const Case& item : cases_of(model, tokens)) {
    const ProductShape& s = item.shape;
    const auto bytes = [](std::int64_t count, Scalar type) {
      return static_cast<std::size_t>(count) * scalar_bytes(type);
    };
    std::vector<std::byte> a(bytes(s.m * s.k, s.inputs)), b(bytes(s.k * s.n, s.inputs)), c(bytes(s.m * s.n, s.output));
    const TiledProduct product(context, s);
    using Dims = dnnl::memory::dims;
    const auto type = [](Scalar x) {
      return x == Scalar::bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
    };
    const dnnl::memory::desc a_md({s.m, s.k}, type(s.inputs), s.transpose_a ? Dims{1, s.lda} : Dims{s.lda, 1});
    const dnnl::memory::desc b_md({s.k, s.n}, type(s.inputs), s.transpose_b ? Dims{1, s.ldb} : Dims{s.ldb, 1});
    const dnnl::memory::desc c_md({s.m, s.n}, type(s.output), Dims{s.ldc, 1});
    const dnnl::matmul primitive(dnnl::matmul::primitive_desc(dnnl::matmul::desc(a_md, b_md, c_md), engine));
    const std::unordered_map<int, dnnl::memory> arguments = {{DNNL_ARG_SRC, dnnl::memory(a_md, engine, a.data())},
                                                             {DNNL_ARG_WEIGHTS, dnnl::memory(b_md, engine, b.data())},
                                                             {DNNL_ARG_DST, dnnl::memory(c_md, engine, c.data())}};
    const auto ours = [&] { product.run(pool, a.data(), b.data(), nullptr, c.data()); };
    const auto bare = [&] {
      primitive.execute(stream, arguments);
      stream.wait();
    };
    ours();
    bare();
    std::vector<double> ours_seconds, bare_seconds, ratios;
    for (int i = 0; i < pairs; ++i) {
      const double ours_1 = seconds_of(ours), bare_1 = seconds_of(bare), bare_2 = seconds_of(bare),
                   ours_2 = seconds_of(ours);
      ours_seconds.push_back((ours_1 + ours_2) / 2);
      bare_seconds.push_back((bare_1 + bare_2) / 2);
      ratios.push_back(bare_seconds.back() / ours_seconds.back());
    }
    const double flops = 2.0 * static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k);
    const double ours_median = median(ours_seconds), bare_median = median(bare_seconds);
    const std::string shape = std::to_string(s.m) + " x " + std::to_string(s.n) + " x " + std::to_string(s.k);
    std::printf("%-12s %24s %14.0f %14.0f %7.2f\n", item.name, shape.c_str(), flops / bare_median * 1e-9,
                flops / ours_median * 1e-9, median(ratios));
    ours_total += item.times * ours_median;
    bare_total += item.times * bare_median;
  }
  std::printf("one block, forward and backward with recomputation: bare %.2f ms, ours %.2f ms, ratio %.2f\n",
              bare_total * 1e3, ours_total * 1e3, bare_total / ours_total);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const long tokens = argc > 2 ? std::strtol(argv[2], nullptr, 10) : 128;
  const long pairs = argc > 3 ? std::strtol(argv[3], nullptr, 10) : 20;
  if (argc < 2 || argc > 4 || tokens < 1 || tokens > 1 << 20 || pairs < 1 || pairs > 10000) {
    std::fprintf(stderr, "usage: %s MODEL.json [tokens] [pairs]\n", argv[0]);
    return 2;
  }
  try {
    return run(argv[1], tokens, static_cast<int>(pairs));
  } catch (const ballast::ConfigError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
