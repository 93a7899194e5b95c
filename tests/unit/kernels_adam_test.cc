// The one-pass update on every instruction set and in every combination of formats: exact to the bound against double
// arithmetic, the same bits however it is vectorised, cut, placed or shared between threads, and nothing touched
// beyond. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ballast/kernels/adam.h"
#include "reference/adam_reference.h"
#include "unit/kernels_adam_support.h"
#include "unit/kernels_support.h"

namespace ballast::kernels {
namespace {

using testing::AdamState;
using testing::all_formats;
using testing::bits_of;
using testing::Edge;
using testing::float_of;
using testing::Formats;
using testing::GuardedArray;
using testing::kSanitized;
using testing::on_each_target;

constexpr AdamHyperparameters kPlain{.learning_rate = 0.01, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8};
constexpr AdamHyperparameters kDecoupled{
    .learning_rate = 0.01, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1, .decoupled = true};
constexpr AdamHyperparameters kL2{
    .learning_rate = 0.002, .beta1 = 0.8, .beta2 = 0.99, .epsilon = 1e-6, .weight_decay = 0.1, .decoupled = false};

void expect_within(double got, const reference::Term& term, double rounding_of_storage, const char* what,
                   std::size_t i) {
  const double allowed = 4.0 * reference::ulp_fp32(term.largest) + rounding_of_storage;
  ASSERT_LE(std::abs(got - term.value), allowed) << what << " of element " << i << ": " << got << " for " << term.value;
}

TEST(Adam, EachResultIsWithinFourUlpOfTheLargestSummandOfItsFormula) {
  const std::size_t count = kSanitized ? 1000 : 10000;
  on_each_target([&] {
    for (const Formats& formats : all_formats()) {
      SCOPED_TRACE(formats.name());
      std::uint64_t seed = 41;
      for (const AdamHyperparameters& hyperparameters : {kPlain, kDecoupled, kL2}) {
        SCOPED_TRACE("seed " + std::to_string(++seed));
        AdamState state = AdamState::random(formats, count, seed);
        for (const std::uint64_t step : {1u, 2u, 3u, 1000u}) {
          const AdamScalars scalars = adam_scalars(hyperparameters, step, 0.37);
          const auto p = state.parameters();
          const auto m = state.get(AdamState::kExpAvg);
          const auto v = state.get(AdamState::kExpAvgSq);
          const auto g = state.get(AdamState::kGradient);
          state.update(scalars);
          const auto new_p = state.parameters();
          const auto new_m = state.get(AdamState::kExpAvg);
          const auto new_v = state.get(AdamState::kExpAvgSq);
          const bool rounded = formats.moment == ElementType::bf16;
          for (std::size_t i = 0; i < count; ++i) {
            const reference::Term m_term = reference::exp_avg(scalars, p[i], m[i], g[i]);
            const reference::Term v_term = reference::exp_avg_sq(scalars, p[i], v[i], g[i]);
            expect_within(new_m[i], m_term, rounded ? 0.5 * reference::ulp_bf16(m_term.value) : 0.0, "m", i);
            expect_within(new_v[i], v_term, rounded ? 0.5 * reference::ulp_bf16(v_term.value) : 0.0, "v", i);
            expect_within(new_p[i], reference::parameter(scalars, p[i], new_m[i], new_v[i]), 0.0, "p", i);
          }
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  });
}

TEST(Adam, PublishesTheNewParameterAndTheComputeCopyIsTheMastersRounding) {
  on_each_target([&] {
    for (const Formats& formats : all_formats()) {
      SCOPED_TRACE(formats.name());
      AdamState state = AdamState::random(formats, 1003, 7);
      state.update(adam_scalars(kDecoupled, 3, 1.0));
      EXPECT_EQ(state.bytes(AdamState::kPublished), state.bytes(AdamState::kParameter));
      AdamState again(formats, state.parameters());
      EXPECT_EQ(again.bytes(AdamState::kParameter), state.bytes(AdamState::kParameter));
      EXPECT_EQ(again.bytes(AdamState::kMaster), state.bytes(AdamState::kMaster));
    }
  });
}

TEST(Adam, ThePublishedArrayIsOptional) {
  on_each_target([&] {
    for (const Formats& formats : all_formats()) {
      SCOPED_TRACE(formats.name());
      AdamState with = AdamState::random(formats, 1003, 9);
      AdamState without = with;
      with.update(adam_scalars(kL2, 3, 1.0));
      AdamArrays arrays = without.arrays();
      arrays.published = nullptr;
      adam(adam_scalars(kL2, 3, 1.0), arrays, without.count());
      for (int s = AdamState::kParameter; s <= AdamState::kGradient; ++s) EXPECT_EQ(with.bytes(s), without.bytes(s));
    }
  });
}

TEST(Adam, BitsDoNotDependOnTheInstructionSet) {
  for (const Formats& formats : all_formats()) {
    SCOPED_TRACE(formats.name());
    for (const AdamHyperparameters& hyperparameters : {kPlain, kDecoupled, kL2}) {
      const AdamState start = AdamState::random(formats, kSanitized ? 1003 : 20011, 11);
      std::unique_ptr<AdamState> first;
      on_each_target([&] {
        AdamState state = start;
        for (std::uint64_t step = 1; step <= 5; ++step) state.update(adam_scalars(hyperparameters, step, 0.5));
        if (first == nullptr) first = std::make_unique<AdamState>(state);
        EXPECT_TRUE(state == *first);
      });
    }
  }
}

// Subnormal, huge and special values too: the same bits (of NaN, that it is one) from every instruction set.
TEST(Adam, ExtremeValuesGiveTheSameOnEveryInstructionSet) {
  const std::vector<float> extremes = {
      0.0f,  -0.0f,   1e-45f,  -1e-45f, 1e-40f, -1e-39f, 1.2e-38f, 1e-20f,    -1e-20f, 1.0f,
      -1.0f, 65504.f, 65520.f, 1e19f,   -1e20f, 3e38f,   INFINITY, -INFINITY, NAN,     float_of(0x7F800001)};
  std::vector<float> p, m, v, g;
  for (const float a : extremes) {
    for (const float b : extremes) {
      for (const float c : extremes) {
        p.push_back(a);
        g.push_back(b);
        m.push_back(c);
        v.push_back(std::abs(c * b));
      }
    }
  }
  for (const Formats& formats : all_formats()) {
    SCOPED_TRACE(formats.name());
    for (const AdamHyperparameters& hyperparameters : {kPlain, kDecoupled, kL2}) {
      std::vector<std::vector<float>> first;
      on_each_target([&] {
        AdamState state(formats, p);
        state.set(AdamState::kExpAvg, m);
        state.set(AdamState::kExpAvgSq, v);
        state.set(AdamState::kGradient, g);
        state.update(adam_scalars(hyperparameters, 2, 1.0));
        const std::vector<std::vector<float>> got = {state.parameters(), state.get(AdamState::kExpAvg),
                                                     state.get(AdamState::kExpAvgSq)};
        if (first.empty()) first = got;
        for (std::size_t s = 0; s < got.size(); ++s) {
          for (std::size_t i = 0; i < p.size(); ++i) {
            if (std::isnan(first[s][i])) {
              ASSERT_TRUE(std::isnan(got[s][i])) << "stream " << s << " element " << i;
            } else {
              ASSERT_EQ(bits_of(got[s][i]), bits_of(first[s][i])) << "stream " << s << " element " << i;
            }
          }
        }
      });
    }
  }
}

TEST(Adam, BitsDoNotDependOnWhereTheRangeIsCut) {
  on_each_target([&] {
    for (const Formats& formats : all_formats()) {
      SCOPED_TRACE(formats.name());
      const AdamState start = AdamState::random(formats, 777, 13);
      const AdamScalars scalars = adam_scalars(kDecoupled, 4, 0.25);
      AdamState whole = start;
      whole.update(scalars);
      for (const std::size_t piece : {1u, 2u, 3u, 7u, 8u, 15u, 16u, 17u, 100u, 776u}) {
        AdamState cut = start;
        for (std::size_t begin = 0; begin < cut.count(); begin += piece) {
          adam(scalars, cut.arrays(begin), std::min(piece, cut.count() - begin));
        }
        EXPECT_TRUE(cut == whole) << "pieces of " << piece;
      }
    }
  });
}

TEST(Adam, BitsDoNotDependOnTheNumberOfThreads) {
  const Formats formats{ParameterFormat::split_bf16, ElementType::fp32, ElementType::bf16};
  const AdamState start = AdamState::random(formats, 65537, 17);
  AdamState whole = start;
  for (std::uint64_t step = 1; step <= 20; ++step) whole.update(adam_scalars(kDecoupled, step, 1.0));
  for (const std::size_t threads : {2u, 3u, 8u, 16u}) {
    AdamState shared = start;
    for (std::uint64_t step = 1; step <= 20; ++step) {
      const AdamScalars scalars = adam_scalars(kDecoupled, step, 1.0);
      std::vector<std::thread> workers;
      for (std::size_t t = 0; t < threads; ++t) {
        const std::size_t begin = shared.count() * t / threads;
        const std::size_t end = shared.count() * (t + 1) / threads;
        workers.emplace_back([&, begin, end] { adam(scalars, shared.arrays(begin), end - begin); });
      }
      for (std::thread& worker : workers) worker.join();
    }
    EXPECT_TRUE(shared == whole) << threads << " threads";
  }
}

// Streams between guard pages, at either end of their memory.
class GuardedState {
 public:
  GuardedState(const AdamState& state, Edge edge) : state_(state) {
    for (int s = 0; s < AdamState::kStreams; ++s) {
      arrays_[s] = std::make_unique<GuardedArray<std::byte>>(state.bytes(s).size(), edge);
      std::copy(state.bytes(s).begin(), state.bytes(s).end(), arrays_[s]->begin());
    }
  }
  void update(const AdamScalars& scalars) {
    std::array<std::byte*, AdamState::kStreams> bases;
    for (int s = 0; s < AdamState::kStreams; ++s) bases[s] = arrays_[s]->data();
    adam(scalars, state_.arrays(0, bases), state_.count());
  }
  std::vector<std::byte> bytes(int stream) { return {arrays_[stream]->begin(), arrays_[stream]->end()}; }

 private:
  const AdamState& state_;
  std::array<std::unique_ptr<GuardedArray<std::byte>>, AdamState::kStreams> arrays_;
};

TEST(Adam, EachLengthUpdatesAllElementsAndTouchesNothingElse) {
  on_each_target([&] {
    for (const Formats& formats : all_formats()) {
      SCOPED_TRACE(formats.name());
      for (const std::size_t count : testing::lengths()) {
        if (count > 5000 && kSanitized) continue;
        const AdamState start = AdamState::random(formats, count, 19 + count);
        const AdamScalars scalars = adam_scalars(kL2, 2, 1.0);
        AdamState one_by_one = start;
        for (std::size_t i = 0; i < count; ++i) adam(scalars, one_by_one.arrays(i), 1);
        for (const Edge edge : {Edge::front, Edge::back}) {
          GuardedState guarded(start, edge);
          guarded.update(scalars);
          for (int s = 0; s < AdamState::kStreams; ++s) {
            ASSERT_EQ(guarded.bytes(s), one_by_one.bytes(s)) << "stream " << s << ", " << count << " elements";
          }
        }
      }
    }
  });
}

// B056: alike elements stay alike, in vectors and in tails.
TEST(Adam, ElementsThatAreAlikeStayAlike) {
  on_each_target([&] {
    for (const std::size_t count : {1u, 2u, 3u, 7u, 8u, 9u, 15u, 16u, 17u, 31u, 33u, 1023u, 1025u, 4097u, 65537u}) {
      AdamState state({ParameterFormat::split_bf16, ElementType::fp32, ElementType::fp32},
                      std::vector<float>(count, 1.0f));
      state.set(AdamState::kGradient, std::vector<float>(count, 0.3f));
      state.update(adam_scalars(kPlain, 1, 1.0));
      const std::vector<float> p = state.parameters();
      EXPECT_NEAR(p[0], 0.99, 2.4e-7);
      EXPECT_EQ(p, std::vector<float>(count, p[0])) << count << " elements";
    }
  });
}

TEST(Adam, PointersNeedNoMoreThanTheirElementsAlignment) {
  on_each_target([&] {
    for (const Formats& formats : all_formats()) {
      SCOPED_TRACE(formats.name());
      const AdamScalars scalars = adam_scalars(kDecoupled, 2, 1.0);
      const AdamState start = AdamState::random(formats, 120, 23);
      AdamState whole = start;
      whole.update(scalars);
      for (std::size_t offset = 1; offset < 20; ++offset) {
        // From `offset` on, with other arrays at other offsets from a vector's boundary because elements differ in
        // size.
        AdamState part = start;
        adam(scalars, part.arrays(offset), 100);
        const auto p = part.parameters();
        const auto expected = whole.parameters();
        const auto before = start.parameters();
        for (std::size_t i = 0; i < p.size(); ++i) {
          const bool inside = i >= offset && i < offset + 100;
          ASSERT_EQ(bits_of(p[i]), bits_of(inside ? expected[i] : before[i])) << "offset " << offset;
        }
      }
    }
  });
}

}  // namespace
}  // namespace ballast::kernels
