// The row kernels against plain double loops, at every width around a vector, and the forms of each instruction set
// against one another.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "gpt/rows.h"
#include "unit/gpt_reference.h"

namespace ballast::gpt {
namespace {

using testing::noise;

const std::int64_t kWidths[] = {1, 2, 5, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 257};

template <class T>
float to_float(T x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    return testing::float_of_bf16(x.bits);
  }
}
template <class T>
std::vector<T> typed(const std::vector<float>& values) {
  std::vector<T> result(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    if constexpr (std::is_same_v<T, float>) {
      result[i] = values[i];
    } else {
      result[i] = Bf16{testing::bf16_of(values[i])};
    }
  }
  return result;
}
// What one rounding to T may add to a value of that size.
template <class T>
double rounding(double size) {
  return std::abs(size) * (std::is_same_v<T, float> ? 4e-6 : 5e-3) + 4e-6;
}

template <class T>
class Rows : public ::testing::Test {};
using Types = ::testing::Types<float, Bf16>;
TYPED_TEST_SUITE(Rows, Types);

TEST(RowsConvert, Bf16RoundsToNearestEvenAndKeepsSpecialValues) {
  const std::uint32_t cases[][2] = {
      {0x3F808000, 0x3F80}, {0x3F818000, 0x3F82}, {0x3F808001, 0x3F81}, {0x3F807FFF, 0x3F80},
      {0x3E89CCD5, 0x3E8A}, {0x4048F5C3, 0x4049}, {0x7F7FFFFF, 0x7F80}, {0x7F7F7FFF, 0x7F7F},
      {0x7F7F8000, 0x7F80}, {0x00008000, 0x0000}, {0x00008001, 0x0001}, {0x00018000, 0x0002},
      {0x807FFFFF, 0x8080}, {0x80000000, 0x8000}, {0x7F800000, 0x7F80}, {0xFF800000, 0xFF80}};
  for (const auto& [bits, expected] : cases) {
    float x;
    std::memcpy(&x, &bits, 4);
    Bf16 h{};
    rows::convert(&x, &h, 1);
    EXPECT_EQ(h.bits, expected) << std::hex << bits;
  }
  for (const std::uint32_t bits : {0x7F800001u, 0x7FFFFFFFu, 0xFF800001u, 0x7FC00000u}) {
    float x;
    std::memcpy(&x, &bits, 4);
    Bf16 h{};
    rows::convert(&x, &h, 1);
    EXPECT_TRUE(std::isnan(testing::float_of_bf16(h.bits))) << std::hex << bits;
  }
}

TEST(RowsConvert, EveryHalfPrecisionNumberIsWidenedExactly) {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  std::vector<float> wide(all.size());
  rows::to_float(all.data(), DataType::fp16, 0, wide.data(), static_cast<std::int64_t>(all.size()));
  for (std::size_t i = 0; i < all.size(); ++i) {
    const int exponent = static_cast<int>(i >> 10 & 31), fraction = static_cast<int>(i & 1023);
    const double sign = (i & 0x8000) != 0 ? -1 : 1;
    if (exponent == 31) {
      EXPECT_TRUE(fraction == 0 ? wide[i] == sign * INFINITY : std::isnan(wide[i])) << i;
    } else {
      const double value = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
      ASSERT_EQ(wide[i], sign * value) << i;
      ASSERT_EQ(std::signbit(wide[i]), sign < 0) << i;
    }
  }
}

TEST(RowsConvert, AnyRangeOfAnyTypeIsReadAndWrittenAlone) {
  for (const std::int64_t n : kWidths) {
    const auto values = typed<Bf16>(noise(1, static_cast<std::size_t>(n + 7)));
    std::vector<float> out(static_cast<std::size_t>(n + 2), 9.0f);
    rows::to_float(values.data(), DataType::bf16, 3, out.data() + 1, n);
    for (std::int64_t i = 0; i < n; ++i)
      EXPECT_EQ(out[static_cast<std::size_t>(i + 1)], to_float(values[static_cast<std::size_t>(i + 3)]));
    EXPECT_EQ(out.front(), 9.0f);
    EXPECT_EQ(out.back(), 9.0f);
    std::vector<Bf16> back(static_cast<std::size_t>(n + 7), Bf16{7});
    rows::from_float(out.data() + 1, back.data(), DataType::bf16, 3, n);
    for (std::size_t i = 0; i < back.size(); ++i) {
      const bool inside = i >= 3 && i < static_cast<std::size_t>(n) + 3;
      EXPECT_EQ(back[i].bits, inside ? values[i].bits : 7);
    }
  }
}

TYPED_TEST(Rows, LayerNormAndItsGradientsAgreeWithDouble) {
  using T = TypeParam;
  const std::size_t rows = 3;
  for (const std::int64_t width : kWidths) {
    const auto c = static_cast<std::size_t>(width);
    const auto x = noise(2, rows * c, 3), addend = noise(3, rows * c), w = noise(4, c), b = noise(5, c),
               d = noise(6, rows * c);
    const auto residual = noise(7, rows * c);
    std::vector<float> sum(rows * c), mean(rows), rstd(rows), d_x = residual, d_w(c), d_b(c);
    std::vector<T> out(rows * c), narrow(rows * c);
    rows::layer_norm<T>({x.data(), addend.data(), sum.data(), w.data(), b.data(), mean.data(), rstd.data()}, out.data(),
                        rows, width);
    rows::layer_norm_backward<T>({d.data(), sum.data(), w.data(), mean.data(), rstd.data(), d_x.data(), d_x.data()},
                                 narrow.data(), rows, width);
    rows::layer_norm_gradients(d.data(), sum.data(), mean.data(), rstd.data(), d_w.data(), d_b.data(), rows, width, 0,
                               width);
    std::vector<double> want_w(c, 0.0), want_b(c, 0.0);
    for (std::size_t r = 0; r < rows; ++r) {
      double m = 0, variance = 0, m1 = 0, m2 = 0;
      for (std::size_t i = r * c; i < (r + 1) * c; ++i) {
        EXPECT_EQ(sum[i], x[i] + addend[i]);
        m += sum[i];
      }
      m /= static_cast<double>(c);
      for (std::size_t i = r * c; i < (r + 1) * c; ++i) variance += (sum[i] - m) * (sum[i] - m);
      const double s = 1 / std::sqrt(variance / static_cast<double>(c) + 1e-5);
      for (std::size_t i = 0; i < c; ++i) {
        const double normal = (sum[r * c + i] - m) * s, g = static_cast<double>(d[r * c + i]) * w[i];
        EXPECT_NEAR(to_float(out[r * c + i]), normal * w[i] + b[i], rounding<T>(2)) << width;
        want_w[i] += d[r * c + i] * normal;
        want_b[i] += d[r * c + i];
        m1 += g / static_cast<double>(c);
        m2 += g * normal / static_cast<double>(c);
      }
      for (std::size_t i = 0; i < c; ++i) {
        const double normal = (sum[r * c + i] - m) * s, g = static_cast<double>(d[r * c + i]) * w[i];
        const double want = residual[r * c + i] + s * (g - m1 - normal * m2);
        EXPECT_NEAR(d_x[r * c + i], want, 2e-5 * (1 + s)) << width;
        EXPECT_EQ(to_float(narrow[r * c + i]), to_float(typed<T>({d_x[r * c + i]})[0]));
      }
    }
    for (std::size_t i = 0; i < c; ++i) {
      EXPECT_NEAR(d_w[i], want_w[i], 2e-5) << width;
      EXPECT_NEAR(d_b[i], want_b[i], 2e-6) << width;
    }
  }
}

TYPED_TEST(Rows, ColumnSumsAddRowsInOrderWhateverTheRange) {
  using T = TypeParam;
  const std::int64_t rows = 37;
  for (const std::int64_t width : kWidths) {
    const auto m = typed<T>(noise(8, static_cast<std::size_t>(rows * width)));
    std::vector<float> whole(static_cast<std::size_t>(width)), parts(static_cast<std::size_t>(width));
    rows::column_sums(m.data(), whole.data(), rows, width, 0, width);
    for (std::int64_t c = 0; c < width; c += 16) {
      rows::column_sums(m.data(), parts.data(), rows, width, c, std::min(width, c + 16));
    }
    for (std::int64_t c = 0; c < width; ++c) {
      float expected = 0;
      for (std::int64_t r = 0; r < rows; ++r) expected += to_float(m[static_cast<std::size_t>(r * width + c)]);
      EXPECT_EQ(whole[static_cast<std::size_t>(c)], expected);
      EXPECT_EQ(parts[static_cast<std::size_t>(c)], expected);
    }
  }
}

TYPED_TEST(Rows, GeluAndItsDerivativeAgreeWithDouble) {
  using T = TypeParam;
  for (const std::int64_t n : kWidths) {
    const auto x = typed<T>(noise(9, static_cast<std::size_t>(n), 9));
    std::vector<T> out(x.size()), gradient = typed<T>(std::vector<float>(x.size(), 1.5f));
    rows::gelu(x.data(), out.data(), n);
    rows::gelu_backward(x.data(), gradient.data(), n);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double v = to_float(x[i]), h = 1e-5;
      const double slope = (testing::reference::gelu(v + h) - testing::reference::gelu(v - h)) / (2 * h);
      EXPECT_NEAR(to_float(out[i]), testing::reference::gelu(v), rounding<T>(v)) << v;
      EXPECT_NEAR(to_float(gradient[i]), 1.5 * slope, rounding<T>(1.5)) << v;
    }
  }
  const auto extreme = typed<T>({-1e4f, -60.0f, 0.0f, 60.0f, 1e4f});
  std::vector<T> out(5);
  rows::gelu(extreme.data(), out.data(), 5);
  for (std::size_t i = 0; i < 5; ++i) EXPECT_NEAR(to_float(out[i]), std::max(0.0f, to_float(extreme[i])), 1e-6);
}

TYPED_TEST(Rows, CausalSoftmaxSeesOnlyThePastAndItsGradientAgreesWithDouble) {
  using T = TypeParam;
  const float scale = 0.37f;
  for (const std::int64_t first : {0, 3, 30}) {
    for (const std::int64_t count : {1, 4, 19}) {
      const std::int64_t columns = first + count;
      const auto size = static_cast<std::size_t>(count * columns);
      auto scores = noise(10, size, 20);
      const auto d = noise(11, size), before = scores;
      std::vector<T> p(size), d_scores(size);
      rows::causal_softmax(scores.data(), p.data(), count, columns, first, scale);
      rows::causal_softmax_backward(p.data(), d.data(), d_scores.data(), count, columns, first, scale);
      for (std::int64_t r = 0; r < count; ++r) {
        const auto row = static_cast<std::size_t>(r * columns), n = static_cast<std::size_t>(first + r + 1);
        double sum = 0, dot = 0;
        for (std::size_t i = 0; i < n; ++i) sum += std::exp(static_cast<double>(before[row + i]) * scale);
        for (std::size_t i = 0; i < n; ++i) dot += static_cast<double>(to_float(p[row + i])) * d[row + i];
        for (std::size_t i = 0; i < static_cast<std::size_t>(columns); ++i) {
          const double want = i < n ? std::exp(static_cast<double>(before[row + i]) * scale) / sum : 0;
          EXPECT_NEAR(to_float(p[row + i]), want, rounding<T>(want));
          const double want_d = i < n ? to_float(p[row + i]) * (d[row + i] - dot) * scale : 0;
          EXPECT_NEAR(to_float(d_scores[row + i]), want_d, rounding<T>(want_d));
          if (i >= n) {
            EXPECT_EQ(to_float(p[row + i]), 0);
            EXPECT_EQ(to_float(d_scores[row + i]), 0);
          }
        }
      }
    }
  }
}

TYPED_TEST(Rows, CrossEntropyAndItsGradientAgreeWithDouble) {
  using T = TypeParam;
  for (const std::int64_t vocabulary : {256, 257, 300, 1000}) {
    const std::size_t rows = 4, stride = static_cast<std::size_t>(vocabulary) + 5;
    auto logits = noise(12, rows * stride, 30);
    logits[7] = 95;  // far above the rest: e^95 alone would overflow
    const auto before = logits;
    const std::uint32_t targets[rows] = {7, 0, 255, 16};
    double losses[rows];
    std::vector<T> d(rows * stride, typed<T>({42.0f})[0]);
    rows::cross_entropy(logits.data(), static_cast<std::int64_t>(stride), targets, losses, d.data(),
                        static_cast<std::int64_t>(stride), 0.25f, rows, vocabulary);
    for (std::size_t r = 0; r < rows; ++r) {
      double sum = 0, highest = -1e9;
      for (std::size_t i = 0; i < static_cast<std::size_t>(vocabulary); ++i)
        highest = std::max<double>(highest, before[r * stride + i]);
      for (std::size_t i = 0; i < static_cast<std::size_t>(vocabulary); ++i)
        sum += std::exp(before[r * stride + i] - highest);
      EXPECT_NEAR(losses[r], std::log(sum) + highest - before[r * stride + targets[r]], 3e-6);
      for (std::size_t i = 0; i < stride; ++i) {
        if (i >= static_cast<std::size_t>(vocabulary)) {
          EXPECT_EQ(to_float(d[r * stride + i]), 42.0f);
          continue;
        }
        const double p = std::exp(before[r * stride + i] - highest) / sum - (i == targets[r] ? 1 : 0);
        EXPECT_NEAR(to_float(d[r * stride + i]), 0.25 * p, rounding<T>(0.25 * p));
      }
    }
  }
}

TEST(RowsGather, SumsTheNamedRowsInOrderAndIsZeroForNone) {
  for (const std::int64_t width : kWidths) {
    const auto x = noise(13, static_cast<std::size_t>(4 * width));
    const std::int32_t indices[] = {2, 0, 2};
    std::vector<float> out(static_cast<std::size_t>(width), 5.0f);
    rows::gather_sum(x.data(), indices, 3, out.data(), width);
    for (std::size_t i = 0; i < out.size(); ++i) {
      const auto w = static_cast<std::size_t>(width);
      EXPECT_EQ(out[i], (x[2 * w + i] + x[i]) + x[2 * w + i]);
    }
    rows::gather_sum(x.data(), indices, 0, out.data(), width);
    for (const float v : out) EXPECT_EQ(v, 0.0f);
  }
}

TEST(RowsEmbed, AddsTokenAndPositionForEachSequence) {
  const std::int64_t width = 19, sequence = 3;
  const std::uint32_t tokens[] = {0, 255, 7, 7, 7, 1};
  const auto wte = noise(14, 256 * width), wpe = noise(15, 4 * width);
  const auto narrow = typed<Bf16>(wte);
  std::vector<float> x(6 * width);
  rows::embed(tokens, narrow.data(), DataType::bf16, wpe.data(), DataType::fp32, x.data(), sequence, width, 0, 4);
  rows::embed(tokens, narrow.data(), DataType::bf16, wpe.data(), DataType::fp32, x.data(), sequence, width, 4, 6);
  for (std::size_t t = 0; t < 6; ++t) {
    for (std::size_t i = 0; i < 19; ++i)
      EXPECT_EQ(x[t * 19 + i], to_float(narrow[tokens[t] * std::size_t{19} + i]) + wpe[t % 3 * 19 + i]);
  }
}

TEST(RowsFill, NormalDeviatesAreThoseOfTheWholeInAnyRangeAndHaveTheRightMoments) {
  const std::int64_t n = 200'000;
  std::vector<float> all(n);
  rows::fill_normal(99, 0, all.data(), n, 0.02f);
  for (const std::int64_t first : {0, 1, 15, 16, 77'777, 199'990}) {
    for (const std::int64_t count : {1, 7, 10}) {
      std::vector<float> part(static_cast<std::size_t>(count));
      rows::fill_normal(99, first, part.data(), count, 0.02f);
      for (std::int64_t i = 0; i < count; ++i)
        EXPECT_EQ(part[static_cast<std::size_t>(i)], all[static_cast<std::size_t>(first + i)]);
    }
  }
  double sum = 0, square = 0, fourth = 0, inside = 0;
  for (const float v : all) {
    const double z = v / 0.02;
    ASSERT_TRUE(std::isfinite(z));
    sum += z;
    square += z * z;
    fourth += z * z * z * z;
    inside += std::abs(z) < 1 ? 1 : 0;
  }
  EXPECT_NEAR(sum / n, 0, 0.01);  // five standard errors and more
  EXPECT_NEAR(square / n, 1, 0.02);
  EXPECT_NEAR(fourth / n, 3, 0.12);
  EXPECT_NEAR(inside / n, 0.682689, 0.006);
  std::vector<float> other(16);
  rows::fill_normal(100, 0, other.data(), 16, 0.02f);
  EXPECT_NE(other[0], all[0]);
}

// One number for the bits of all kernels. It is the same on every instruction set (the runs named after one compare it)
// and with every compiler, for as long as nobody changes an operation.
TEST(RowsBits, AreTheSameOnEveryInstructionSet) {
  std::uint64_t hash = 1469598103934665603u;
  const auto add = [&](const auto& values) {
    for (const auto& value : values) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, &value, sizeof value);
      hash = (hash ^ bits) * 1099511628211u;
    }
  };
  const std::int64_t rows = 5, width = 53;
  const auto count = static_cast<std::size_t>(rows * width), c = static_cast<std::size_t>(width);
  const auto x = noise(20, count, 4), w = noise(21, c), b = noise(22, c), d = noise(23, count);
  std::vector<float> mean(5), rstd(5), d_x(count), d_w(c), d_b(c), normal(count), scores = noise(24, count, 9);
  std::vector<Bf16> out(count), p(count), d_scores(count);
  rows::layer_norm<Bf16>({x.data(), nullptr, nullptr, w.data(), b.data(), mean.data(), rstd.data()}, out.data(), rows,
                         width);
  add(out);
  rows::gelu(out.data(), p.data(), rows * width);
  add(p);
  rows::gelu_backward(out.data(), p.data(), rows * width);
  add(p);
  rows::layer_norm_backward<float>({d.data(), x.data(), w.data(), mean.data(), rstd.data(), nullptr, d_x.data()},
                                   nullptr, rows, width);
  add(d_x);
  rows::layer_norm_gradients(d.data(), x.data(), mean.data(), rstd.data(), d_w.data(), d_b.data(), rows, width, 0,
                             width);
  add(d_w);
  rows::causal_softmax(scores.data(), p.data(), rows, width, width - rows, 0.5f);
  add(p);
  rows::causal_softmax_backward(p.data(), d.data(), d_scores.data(), rows, width, width - rows, 0.5f);
  add(d_scores);
  rows::fill_normal(1, 5, normal.data(), rows * width, 0.02f);
  add(normal);
  auto logits = noise(25, 300, 8);
  std::vector<float> d_logits(300);
  const std::uint32_t target = 77;
  double loss = 0;
  rows::cross_entropy(logits.data(), 300, &target, &loss, d_logits.data(), 300, 1.0f, 1, 300);
  add(d_logits);
  EXPECT_EQ(hash, 0xecf8bd953abe2e41u) << std::hex << hash;
}

}  // namespace
}  // namespace ballast::gpt
