// The GPT's forward and backward as a whole: against double precision, and against themselves under other settings.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "gpt/math.h"
#include "gpt/matmul.h"
#include "unit/gpt_reference.h"

namespace ballast::gpt {
namespace {

using testing::MemoryModel;

struct Case {
  GptShape shape;
  std::int64_t sequences = 2, sequence = 5;
};

struct Outcome {
  double loss = 0;
  std::vector<float> gradients;
};

std::vector<std::uint8_t> bytes(std::uint64_t seed, std::size_t count) {
  base::Random random(seed);
  std::vector<std::uint8_t> result(count);
  for (auto& b : result) b = static_cast<std::uint8_t>(random.below(256));
  return result;
}

std::unique_ptr<GptMath> make_math(const Case& c, DataType type, DataType gradient, int threads = 2,
                                   std::int64_t slots = 1, bool widen = false) {
  MathOptions options;
  options.sequences = c.sequences;
  options.sequence = c.sequence;
  options.slots = slots;
  options.parameters = type;
  options.gradients = gradient;
  options.threads = threads;
  options.always_widen = widen;
  return GptMath::create(c.shape, options);
}

void give_text(const Case& c, GptMath& math, std::int64_t slot = 0) {
  const auto text = bytes(7 + static_cast<std::uint64_t>(slot), static_cast<std::size_t>(2 * c.sequences * c.sequence));
  const auto tokens = math.tokens(slot), targets = math.targets(slot);
  std::copy_n(text.begin(), tokens.size(), tokens.begin());
  std::copy_n(text.begin() + static_cast<std::ptrdiff_t>(tokens.size()), targets.size(), targets.begin());
}

Outcome run(const Case& c, DataType type, DataType gradient, int threads = 2, bool widen = false, double scale = 1) {
  MemoryModel model(c.shape, type, gradient, 3, 0.1f);
  const auto math = make_math(c, type, gradient, threads, 1, widen);
  give_text(c, *math);
  Outcome result;
  result.loss = model.run(*math, scale);
  result.gradients = model.all_gradients();
  return result;
}

double relative_error(const std::vector<float>& a, const std::vector<float>& b, double factor = 1) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(a[i] - factor * b[i], 2);
    size += std::pow(factor * b[i], 2);
  }
  return std::sqrt(difference / size);
}

const Case kTiny{{.layers = 2, .width = 12, .heads = 3, .context = 7, .vocabulary = 256, .tie_embeddings = true}, 2, 5};
const Case kUntied{
    {.layers = 1, .width = 20, .heads = 2, .context = 9, .vocabulary = 300, .tie_embeddings = false}, 1, 9};
// Crosses every border of a block: of query rows, of rows of logits, of tiles.
const Case kBorders{
    {.layers = 2, .width = 192, .heads = 2, .context = 200, .vocabulary = 257, .tie_embeddings = true}, 2, 150};
const Case kLargeVocabulary{
    {.layers = 1, .width = 16, .heads = 2, .context = 140, .vocabulary = 50257, .tie_embeddings = true}, 1, 140};

TEST(GptMath, GradientsOfAllParametersAgreeWithFiniteDifferencesInDouble) {
  for (const Case& c : {kTiny, kUntied}) {
    MemoryModel model(c.shape, DataType::fp32, DataType::fp32, 3);
    const auto math = make_math(c, DataType::fp32, DataType::fp32);
    give_text(c, *math);
    const double loss = model.run(*math, 1);
    auto parameters = testing::double_parameters(model);
    const std::vector<std::uint8_t> tokens(math->tokens(0).begin(), math->tokens(0).end());
    const std::vector<std::uint8_t> targets(math->targets(0).begin(), math->targets(0).end());
    const auto sequence = static_cast<std::size_t>(c.sequence);
    EXPECT_NEAR(loss, testing::double_loss(c.shape, parameters, tokens, targets, sequence), 2e-5);
    for (std::size_t u = 0; u < parameters.size(); ++u) {
      for (std::size_t i = 0; i < parameters[u].size(); ++i) {
        auto& values = parameters[u][i];
        const std::size_t stride = std::max<std::size_t>(1, values.size() / 40) | 1;
        double largest = 0, worst = 0;
        for (std::size_t e = 0; e < values.size(); e += stride) {
          const double value = values[e], h = 1e-5;
          values[e] = value + h;
          const double above = testing::double_loss(c.shape, parameters, tokens, targets, sequence);
          values[e] = value - h;
          const double below = testing::double_loss(c.shape, parameters, tokens, targets, sequence);
          values[e] = value;
          const double expected = (above - below) / (2 * h);
          largest = std::max(largest, std::abs(expected));
          worst = std::max(worst, std::abs(expected - model.gradient(u, i, static_cast<std::int64_t>(e))));
        }
        EXPECT_LE(worst, 2e-5 * largest + 2e-7) << "unit " << u << " parameter " << i;
      }
    }
  }
}

TEST(GptMath, ADirectionalDerivativeAgreesWithDoubleAcrossAllBlockBorders) {
  for (const Case& c : {kBorders, kLargeVocabulary}) {
    MemoryModel model(c.shape, DataType::fp32, DataType::fp32, 5, 0.1f);
    const auto math = make_math(c, DataType::fp32, DataType::fp32);
    give_text(c, *math);
    const double loss = model.run(*math, 1);
    auto parameters = testing::double_parameters(model);
    const std::vector<std::uint8_t> tokens(math->tokens(0).begin(), math->tokens(0).end());
    const std::vector<std::uint8_t> targets(math->targets(0).begin(), math->targets(0).end());
    // Along the gradient itself, normalised: the derivative is its norm, so no parameter's error can hide by sign.
    double square = 0;
    for (std::size_t u = 0; u < parameters.size(); ++u) {
      for (std::size_t i = 0; i < parameters[u].size(); ++i) {
        for (std::size_t e = 0; e < parameters[u][i].size(); ++e) {
          square += std::pow(model.gradient(u, i, static_cast<std::int64_t>(e)), 2);
        }
      }
    }
    const double norm = std::sqrt(square), h = 1e-4;
    const auto at = [&](double step) {
      auto moved = parameters;
      for (std::size_t u = 0; u < moved.size(); ++u) {
        for (std::size_t i = 0; i < moved[u].size(); ++i) {
          for (std::size_t e = 0; e < moved[u][i].size(); ++e) {
            moved[u][i][e] += step * model.gradient(u, i, static_cast<std::int64_t>(e)) / norm;
          }
        }
      }
      return testing::double_loss(c.shape, moved, tokens, targets, static_cast<std::size_t>(c.sequence));
    };
    const double above = at(h), below = at(-h);
    EXPECT_NEAR(loss, (above + below) / 2, 1e-4);
    EXPECT_NEAR((above - below) / (2 * h), norm, 2e-4 * norm);
  }
}

TEST(GptMath, LossAndGradientsHaveTheSameBitsForAnyNumberOfThreads) {
  for (const Case& c : {kTiny, kUntied, kBorders, kLargeVocabulary}) {
    for (const DataType type : {DataType::bf16, DataType::fp32}) {
      const Outcome one = run(c, type, DataType::fp32, 1);
      for (const int threads : {2, 3, 5}) {
        const Outcome many = run(c, type, DataType::fp32, threads);
        EXPECT_EQ(one.loss, many.loss) << threads << " threads";
        EXPECT_TRUE(one.gradients == many.gradients) << threads << " threads";
      }
    }
  }
}

TEST(GptMath, Bf16StaysCloseToFp32OfTheSameParameters) {
  if (!ProductContext::bf16_products()) GTEST_SKIP() << "this CPU has no bf16 product in oneDNN (AVX-512 is the least)";
  for (const Case& c : {kTiny, kUntied, kBorders}) {
    const Outcome narrow = run(c, DataType::bf16, DataType::fp32);
    const Outcome wide = run(c, DataType::bf16, DataType::fp32, 2, true);
    EXPECT_NE(narrow.loss, wide.loss);
    EXPECT_NEAR(narrow.loss, wide.loss, 0.02);
    EXPECT_LT(relative_error(narrow.gradients, wide.gradients), 0.03);
  }
}

TEST(GptMath, WidenedBf16GivesTheNumbersOfTheSameValuesInFp32) {
  MemoryModel narrow(kBorders.shape, DataType::bf16, DataType::fp32, 3);
  MemoryModel wide(kBorders.shape, DataType::fp32, DataType::fp32, 3);
  for (std::size_t u = 0; u < wide.units().size(); ++u) {
    for (std::size_t i = 0; i < wide.units()[u].size(); ++i) {
      auto& p = wide.units()[u][i];
      for (std::int64_t e = 0; e < p.elements; ++e)
        p.master[static_cast<std::size_t>(e)] = narrow.units()[u][i].value(e);
      p.publish();
    }
  }
  const auto a = make_math(kBorders, DataType::bf16, DataType::fp32, 2, 1, true);
  const auto b = make_math(kBorders, DataType::fp32, DataType::fp32);
  give_text(kBorders, *a);
  give_text(kBorders, *b);
  EXPECT_EQ(narrow.run(*a, 1), wide.run(*b, 1));
  EXPECT_TRUE(narrow.all_gradients() == wide.all_gradients());
  EXPECT_NE(a->note().find("widened to fp32"), std::string::npos) << a->note();
}

TEST(GptMath, Fp16ParametersAreWidenedAndGiveFiniteCloseNumbers) {
  const Outcome half = run(kTiny, DataType::fp16, DataType::fp32);
  const Outcome wide = run(kTiny, DataType::fp32, DataType::fp32);
  EXPECT_NEAR(half.loss, wide.loss, 0.01);
  EXPECT_LT(relative_error(half.gradients, wide.gradients), 0.01);
  const auto math = make_math(kTiny, DataType::fp16, DataType::fp32);
  EXPECT_NE(math->note().find("fp16 parameters are widened"), std::string::npos) << math->note();
}

TEST(GptMath, Bf16GradientsAreTheFp32OnesRounded) {
  for (const DataType type : {DataType::bf16, DataType::fp32}) {
    const Outcome exact = run(kTiny, type, DataType::fp32);
    const Outcome rounded = run(kTiny, type, DataType::bf16);
    EXPECT_EQ(exact.loss, rounded.loss);
    EXPECT_FALSE(exact.gradients == rounded.gradients);
    EXPECT_LT(relative_error(rounded.gradients, exact.gradients), 0.004);
  }
}

TEST(GptMath, ALossScaleMultipliesTheGradientsAndNotTheLoss) {
  const Outcome plain = run(kTiny, DataType::bf16, DataType::fp32);
  const Outcome scaled = run(kTiny, DataType::bf16, DataType::fp32, 2, false, 1024);
  EXPECT_EQ(plain.loss, scaled.loss);
  EXPECT_LT(relative_error(scaled.gradients, plain.gradients, 1024), 1e-6);
}

TEST(GptMath, SlotsInterleavedByLayerGiveTheNumbersOfEachSlotAlone) {
  const Case& c = kTiny;
  MemoryModel model(c.shape, DataType::bf16, DataType::fp32, 3);
  const auto alone = make_math(c, DataType::bf16, DataType::fp32);
  std::vector<Outcome> expected;
  for (std::int64_t slot = 0; slot < 3; ++slot) {
    const auto text = make_math(c, DataType::bf16, DataType::fp32, 1, 3);
    give_text(c, *text, slot);
    std::copy_n(text->tokens(slot).begin(), alone->tokens(0).size(), alone->tokens(0).begin());
    std::copy_n(text->targets(slot).begin(), alone->targets(0).size(), alone->targets(0).begin());
    Outcome r;
    r.loss = model.run(*alone, 1);
    r.gradients = model.all_gradients();
    expected.push_back(std::move(r));
  }
  const auto math = make_math(c, DataType::bf16, DataType::fp32, 2, 3);
  for (std::int64_t slot = 0; slot < 3; ++slot) give_text(c, *math, slot);
  // Forward of all slots, layer by layer, then backward of each: the shared buffers hold another slot's block by then.
  auto views = [&](std::size_t u) {
    BlockViews v{};
    for (std::size_t i = 0; i < model.units()[u].size(); ++i) v[i] = model.units()[u][i].view();
    return v;
  };
  for (std::int64_t slot = 0; slot < 3; ++slot) {
    math->embedding_forward(slot, {model.units()[0][0].view(), model.units()[0][1].view()});
  }
  for (std::int64_t layer = 0; layer < c.shape.layers; ++layer) {
    for (std::int64_t slot = 0; slot < 3; ++slot)
      math->block_forward(slot, layer, views(static_cast<std::size_t>(layer) + 1));
  }
  auto& last = model.units().back();
  for (std::int64_t slot = 0; slot < 3; ++slot) {
    const double loss = math->head_loss(slot, {last[0].view(), last[1].view(), View{}}, model.units()[0][0].view(), 1);
    EXPECT_EQ(loss, expected[static_cast<std::size_t>(slot)].loss);
    model.backward(*math, slot);
    EXPECT_TRUE(model.all_gradients() == expected[static_cast<std::size_t>(slot)].gradients) << "slot " << slot;
  }
}

TEST(GptMath, ALossAloneMovesNothingThatALaterStepSees) {
  MemoryModel model(kTiny.shape, DataType::bf16, DataType::fp32, 3);
  const auto math = make_math(kTiny, DataType::bf16, DataType::fp32);
  give_text(kTiny, *math);
  const double first = model.run(*math, 1);
  const auto gradients = model.all_gradients();
  EXPECT_EQ(model.run(*math, 0), first);
  EXPECT_EQ(model.run(*math, 1), first);
  EXPECT_TRUE(model.all_gradients() == gradients);
}

TEST(GptMath, ANonFiniteParameterReachesTheLossInsteadOfBeingHidden) {
  for (const float bad : {std::nanf(""), INFINITY}) {
    MemoryModel model(kTiny.shape, DataType::bf16, DataType::fp32, 3);
    auto& p = model.units()[1][block::c_fc_weight];
    p.master[5] = bad;
    const std::uint16_t bits = std::isnan(bad) ? 0x7FC0 : 0x7F80;
    std::memcpy(p.bytes.data() + 10, &bits, 2);
    const auto math = make_math(kTiny, DataType::bf16, DataType::fp32);
    give_text(kTiny, *math);
    EXPECT_FALSE(std::isfinite(model.run(*math, 1)));
  }
}

// A small GPT in plain memory with a plain Adam learns a text that repeats.
TEST(GptMath, ASmallModelLearnsARepeatingTextWithAPlainAdam) {
  const Case c{{.layers = 2, .width = 32, .heads = 4, .context = 16, .vocabulary = 256, .tie_embeddings = true}, 4, 16};
  MemoryModel model(c.shape, DataType::bf16, DataType::fp32, 11, 0.05f);
  const auto math = make_math(c, DataType::bf16, DataType::fp32);
  const std::string text = "the quick brown fox jumps over the lazy dog; ";
  std::vector<std::vector<double>> m, v;
  for (auto& unit : model.units()) {
    for (auto& p : unit) {
      m.emplace_back(static_cast<std::size_t>(p.elements), 0.0);
      v.emplace_back(static_cast<std::size_t>(p.elements), 0.0);
    }
  }
  base::Random random(1);
  double first = 0, last = 0;
  for (int step = 1; step <= 120; ++step) {
    for (std::int64_t s = 0; s < c.sequences; ++s) {
      const std::size_t offset = random.below(text.size());
      for (std::int64_t t = 0; t < c.sequence; ++t) {
        const auto i = static_cast<std::size_t>(s * c.sequence + t), at = offset + static_cast<std::size_t>(t);
        math->tokens(0)[i] = static_cast<std::uint8_t>(text[at % text.size()]);
        math->targets(0)[i] = static_cast<std::uint8_t>(text[(at + 1) % text.size()]);
      }
    }
    last = model.run(*math, 1);
    if (step == 1) first = last;
    std::size_t index = 0;
    for (std::size_t u = 0; u < model.units().size(); ++u) {
      for (std::size_t i = 0; i < model.units()[u].size(); ++i, ++index) {
        auto& p = model.units()[u][i];
        for (std::int64_t e = 0; e < p.elements; ++e) {
          const auto k = static_cast<std::size_t>(e);
          const double g = model.gradient(u, i, e);
          m[index][k] = 0.9 * m[index][k] + 0.1 * g;
          v[index][k] = 0.95 * v[index][k] + 0.05 * g * g;
          const double mean = m[index][k] / (1 - std::pow(0.9, step)),
                       square = v[index][k] / (1 - std::pow(0.95, step));
          p.master[k] -= static_cast<float>(3e-3 * mean / (std::sqrt(square) + 1e-8));
        }
        p.publish();
      }
    }
  }
  EXPECT_NEAR(first, std::log(256.0), 0.3);
  EXPECT_LT(last, 0.5);
}

}  // namespace
}  // namespace ballast::gpt
