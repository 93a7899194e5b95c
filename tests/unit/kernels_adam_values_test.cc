// Known values of Adam and AdamW, and what must not happen at the edges of its hyperparameters.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "ballast/kernels/adam.h"
#include "unit/kernels_adam_support.h"
#include "unit/kernels_support.h"

namespace ballast::kernels {
namespace {

using testing::AdamState;
using testing::all_formats;
using testing::bits_of;
using testing::float_of;
using testing::Formats;
using testing::on_each_target;

constexpr double kUlpsNearOne = 2.4e-7;  // four fp32 units in the last place
constexpr Formats kSplit{ParameterFormat::split_bf16, ElementType::fp32, ElementType::fp32};

// Formats whose moments and gradients carry fp32.
std::vector<Formats> exact_formats() {
  return {kSplit,
          {ParameterFormat::fp16, ElementType::fp32, ElementType::fp32},
          {ParameterFormat::fp32, ElementType::fp32, ElementType::fp32}};
}

// A vector and a tail of alike elements.
constexpr std::size_t kCount = 19;

void step_with(AdamState& state, float gradient, const AdamScalars& scalars) {
  state.set(AdamState::kGradient, std::vector<float>(kCount, gradient));
  state.update(scalars);
}

TEST(AdamValues, TheFirstStepMovesByTheLearningRate) {
  const AdamHyperparameters h{.learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8};
  on_each_target([&] {
    for (const Formats& formats : exact_formats()) {
      SCOPED_TRACE(formats.name());
      for (const float sign : {1.0f, -1.0f}) {
        AdamState from_one(formats, std::vector<float>(kCount, sign));
        step_with(from_one, sign * 0.1f, adam_scalars(h, 1, 1.0));
        AdamState from_zero(formats, std::vector<float>(kCount, 0.0f));
        step_with(from_zero, sign * 0.1f, adam_scalars(h, 1, 1.0));
        for (std::size_t i = 0; i < kCount; ++i) {
          EXPECT_NEAR(from_one.parameters()[i] * sign, 0.9990000001, kUlpsNearOne);
          EXPECT_NEAR(from_zero.parameters()[i] * sign, -9.999999e-4, 1e-9);
        }
      }
    }
  });
}

TEST(AdamValues, TenStepsOfAlternatingGradientsMatchTheTable) {
  struct Row {
    double p, m, v;
  };
  const std::vector<Row> rows = {{0.990000001000, 0.01, 1e-05},
                                 {0.993661036039, -0.011, 4.999e-05},
                                 {0.990228625395, 0.0201, 0.00013994001},
                                 {0.992554030216, -0.02191, 0.00029980007},
                                 {0.990325736470, 0.030281, 0.0005495002699},
                                 {0.992119111722, -0.0327471, 0.0009089507697},
                                 {0.990383449655, 0.04052761, 0.001398041819},
                                 {0.991895440551, -0.043525151, 0.002036643777},
                                 {0.990422528140, 0.0508273641, 0.002844607133},
                                 {0.991763455567, -0.05425537231, 0.003841762526}};
  const AdamHyperparameters h{.learning_rate = 0.01, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8};
  on_each_target([&] {
    for (const Formats& formats : exact_formats()) {
      SCOPED_TRACE(formats.name());
      AdamState state(formats, std::vector<float>(kCount, 1.0f));
      for (std::size_t t = 1; t <= rows.size(); ++t) {
        const float gradient = static_cast<float>((t % 2 == 1 ? 0.1 : -0.1) * static_cast<double>(t));
        step_with(state, gradient, adam_scalars(h, t, 1.0));
        const Row& row = rows[t - 1];
        for (std::size_t i = 0; i < kCount; ++i) {
          EXPECT_NEAR(state.parameters()[i], row.p, kUlpsNearOne) << "step " << t;
          EXPECT_NEAR(state.get(AdamState::kExpAvg)[i], row.m, std::abs(row.m) * 1e-6) << "step " << t;
          EXPECT_NEAR(state.get(AdamState::kExpAvgSq)[i], row.v, row.v * 1e-6) << "step " << t;
        }
      }
    }
  });
}

TEST(AdamValues, DecayIsDecoupledOrPartOfTheGradientAsAsked) {
  struct Mode {
    bool decoupled;
    std::array<double, 3> p;
  };
  for (const Mode& mode :
       {Mode{true, {0.989000001, 0.991672036, 0.987247953}}, Mode{false, {0.9900000005, 0.987375197, 0.980811595}}}) {
    const AdamHyperparameters h{.learning_rate = 0.01,
                                .beta1 = 0.9,
                                .beta2 = 0.999,
                                .epsilon = 1e-8,
                                .weight_decay = 0.1,
                                .decoupled = mode.decoupled};
    on_each_target([&] {
      AdamState state(kSplit, std::vector<float>(kCount, 1.0f));
      const std::array<float, 3> gradients = {0.1f, -0.2f, 0.3f};
      for (std::size_t t = 0; t < 3; ++t) {
        step_with(state, gradients[t], adam_scalars(h, t + 1, 1.0));
        for (const float p : state.parameters()) EXPECT_NEAR(p, mode.p[t], 2 * kUlpsNearOne) << "step " << t + 1;
      }
    });
  }
}

TEST(AdamValues, TheGradientScaleActsBeforeTheMoments) {
  const AdamHyperparameters h{.learning_rate = 0.1, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1.0};
  on_each_target([&] {
    AdamState state(kSplit, std::vector<float>(kCount, 1.0f));
    step_with(state, 1024.0f, adam_scalars(h, 1, 0.5 / 1024.0));
    // With epsilon 1 the size of the gradient shows: lr * g / (g + 1) at g = 0.5.
    for (const float p : state.parameters()) EXPECT_NEAR(p, 1.0 - 0.1 * 0.5 / 1.5, kUlpsNearOne);
  });
}

TEST(AdamValues, TheStepNumberIsCountedBeyondWhatFloatsHold) {
  const AdamHyperparameters h{.learning_rate = 0.01, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8};
  struct Case {
    std::uint64_t step;
    double p;
  };
  for (const Case& c :
       {Case{257, 0.995238370}, Case{2049, 0.990665825}, Case{16777217, 0.990000001}, Case{4294967296, 0.990000001}}) {
    AdamState state(kSplit, std::vector<float>(kCount, 1.0f));
    state.set(AdamState::kExpAvg, std::vector<float>(kCount, 0.1f));
    state.set(AdamState::kExpAvgSq, std::vector<float>(kCount, 0.01f));
    step_with(state, 0.1f, adam_scalars(h, c.step, 1.0));
    for (const float p : state.parameters()) EXPECT_NEAR(p, c.p, kUlpsNearOne) << "step " << c.step;
  }
  for (const std::uint64_t step : {std::uint64_t{16777217}, std::uint64_t{4294967296}, ~std::uint64_t{0}}) {
    const AdamScalars scalars = adam_scalars(h, step, 1.0);
    EXPECT_EQ(scalars.step_size, 0.01f);
    EXPECT_EQ(scalars.inverse_sqrt_correction2, 1.0f);
  }
}

TEST(AdamValues, ScalarsAreComputedInDoubleAndRoundedOnce) {
  const AdamHyperparameters h{
      .learning_rate = 0.1, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = 0.01, .decoupled = true};
  EXPECT_EQ(adam_scalars(h, 1, 1.0).one_minus_beta2, 0.001f);  // not 1 - 0.999f = 0.000999987
  EXPECT_EQ(adam_scalars(h, 1, 1.0).one_minus_beta1, 0.1f);
  EXPECT_EQ(adam_scalars(h, 1, 1.0).decay_factor, 0.999f);
  EXPECT_EQ(adam_scalars(h, 1, 1.0).l2_decay, 0.0f);
  EXPECT_EQ(adam_scalars(h, 1, 1.0).step_size, 1.0f);
  EXPECT_FLOAT_EQ(adam_scalars(h, 1, 1.0).inverse_sqrt_correction2, static_cast<float>(1.0 / std::sqrt(0.001)));
  // 1 - 0.999^1000 and 1 - 0.999^10000; with a power of the fp32 beta the second is 0.9999548197.
  EXPECT_EQ(adam_scalars(h, 1000, 1.0).inverse_sqrt_correction2,
            static_cast<float>(1.0 / std::sqrt(1.0 - std::exp(1000.0 * std::log(0.999)))));
  EXPECT_EQ(adam_scalars(h, 10000, 1.0).inverse_sqrt_correction2, static_cast<float>(1.0 / std::sqrt(0.9999548266540)));
}

TEST(AdamValues, LearningRateZeroKeepsParametersBitForBitAndUpdatesMoments) {
  const std::vector<float> values = {1.0f,     0.0f,      -0.0f,     -1.0f,  1e-45f,  -1e-40f, 3e38f,
                                     INFINITY, -INFINITY, 0x1.8p-9f, 0.125f, 65504.f, -3.5f};
  on_each_target([&] {
    for (const Formats& formats : all_formats()) {
      SCOPED_TRACE(formats.name());
      for (const bool decoupled : {false, true}) {
        for (const double decay : {0.0, 0.1}) {
          for (const float gradient : {0.0f, 0.1f, -0.1f}) {
            const AdamHyperparameters h{.learning_rate = 0.0,
                                        .beta1 = 0.9,
                                        .beta2 = 0.999,
                                        .epsilon = 1e-8,
                                        .weight_decay = decay,
                                        .decoupled = decoupled};
            std::vector<float> p;
            // With L2 an infinite parameter makes an infinite gradient, which is not a question of the learning rate.
            for (const float value : values) {
              if (std::isfinite(value * 10.0f) || decoupled || decay == 0.0) p.push_back(value);
            }
            AdamState state(formats, p);
            state.set(AdamState::kGradient, std::vector<float>(p.size(), gradient));
            const AdamState before = state;
            state.update(adam_scalars(h, 1, 1.0));
            for (const int s : {AdamState::kParameter, AdamState::kMaster}) EXPECT_EQ(state.bytes(s), before.bytes(s));
            if (gradient != 0.0f && decay == 0.0) {
              EXPECT_NEAR(state.get(AdamState::kExpAvg)[0], 0.1 * gradient, 1e-4);
              EXPECT_GT(state.get(AdamState::kExpAvgSq)[0], 0.0f);
            }
          }
        }
      }
    }
  });
}

TEST(AdamValues, NoGradientAndNoDecayMeanNoMoveWhateverEpsilonIs) {
  on_each_target([&] {
    for (const Formats& formats : all_formats()) {
      SCOPED_TRACE(formats.name());
      for (const double epsilon : {0.0, 1e-8}) {
        const AdamHyperparameters h{.learning_rate = 0.01, .beta1 = 0.9, .beta2 = 0.999, .epsilon = epsilon};
        AdamState state(formats, {1.0f, -0.0f, 0.0f, 3e-39f, -65504.0f, 1.0f, 0.1f});
        const AdamState before = state;
        for (std::uint64_t step = 1; step <= 100; ++step) state.update(adam_scalars(h, step, 1.0));
        for (const int s : {AdamState::kParameter, AdamState::kMaster, AdamState::kExpAvg, AdamState::kExpAvgSq}) {
          EXPECT_EQ(state.bytes(s), before.bytes(s));
        }
      }
    }
  });
}

TEST(AdamValues, SmallUpdatesReachTheMasterBehindABf16Parameter) {
  const AdamHyperparameters h{.learning_rate = 1e-4, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8};
  on_each_target([&] {
    AdamState state({ParameterFormat::split_bf16, ElementType::fp32, ElementType::bf16},
                    std::vector<float>(kCount, 1.0f));
    for (std::uint64_t step = 1; step <= 100; ++step) step_with(state, 0.5f, adam_scalars(h, step, 1.0));
    for (const float p : state.parameters()) EXPECT_NEAR(p, 0.98999834, 1e-6);
    for (const float p : testing::read_elements(ElementType::bf16, state.bytes(AdamState::kParameter).data(), kCount)) {
      EXPECT_EQ(p, 0.98828125f);  // 1.0 without a master
    }
  });
}

TEST(AdamValues, DecayActsOnTheMasterBehindABf16Parameter) {
  const AdamHyperparameters h{
      .learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = 0.01, .decoupled = true};
  on_each_target([&] {
    AdamState state(kSplit, std::vector<float>(kCount, 1.0f));
    for (std::uint64_t step = 1; step <= 1000; ++step) step_with(state, 0.0f, adam_scalars(h, step, 1.0));
    for (const float p : state.parameters()) EXPECT_NEAR(p, 0.99003446, kUlpsNearOne);
    for (const float p : testing::read_elements(ElementType::bf16, state.bytes(AdamState::kParameter).data(), kCount)) {
      EXPECT_EQ(p, 0.98828125f);
    }
  });
}

TEST(AdamValues, AGradientThatIsNotFiniteMakesItsOwnElementNotFiniteAndNoOther) {
  const AdamHyperparameters h{.learning_rate = 0.01, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8};
  on_each_target([&] {
    for (const Formats& formats : all_formats()) {
      SCOPED_TRACE(formats.name());
      AdamState state(formats, std::vector<float>(kCount, 1.0f));
      std::vector<float> gradients(kCount, 0.5f);
      gradients[3] = NAN;
      gradients[kCount - 1] = INFINITY;
      state.set(AdamState::kGradient, gradients);
      state.update(adam_scalars(h, 1, 1.0));
      const std::vector<float> p = state.parameters();
      for (std::size_t i = 0; i < kCount; ++i) {
        EXPECT_EQ(std::isnan(p[i]), i == 3 || i == kCount - 1) << "element " << i;
      }
    }
  });
}

#ifndef BALLAST_TEST_SANITIZED  // 20 GiB of address space would need shadow memory

// One small file mapped over and over: arrays of more than 2^31 elements in 4 MiB of memory. Elements that share memory
// are updated several times, so only that every one is reached is checked, by the last block, which has its own memory.
class RepeatedMapping {
 public:
  explicit RepeatedMapping(std::size_t bytes) {
    blocks_ = (bytes + kBlock - 1) / kBlock;
    file_ = ::memfd_create("kernels", 0);
    ok_ = file_ >= 0 && ::ftruncate(file_, 2 * kBlock) == 0;
    if (!ok_) return;
    base_ = ::mmap(nullptr, blocks_ * kBlock, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ok_ = base_ != MAP_FAILED;
    for (std::size_t b = 0; ok_ && b < blocks_; ++b) {
      const off_t offset = b + 1 == blocks_ ? static_cast<off_t>(kBlock) : 0;
      char* const place = static_cast<char*>(base_) + b * kBlock;
      ok_ = ::mmap(place, kBlock, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file_, offset) == place;
    }
  }
  ~RepeatedMapping() {
    if (base_ != nullptr && base_ != MAP_FAILED) ::munmap(base_, blocks_ * kBlock);
    if (file_ >= 0) ::close(file_);
  }
  RepeatedMapping(const RepeatedMapping&) = delete;
  RepeatedMapping& operator=(const RepeatedMapping&) = delete;
  bool ok() const { return ok_; }
  std::uint16_t* data() { return static_cast<std::uint16_t*>(base_); }

 private:
  static constexpr std::size_t kBlock = std::size_t{4} << 20;
  std::size_t blocks_ = 0;
  int file_ = -1;
  void* base_ = nullptr;
  bool ok_ = false;
};

TEST(AdamValues, MoreThanTwoToThe31ElementsInOneCallAreAllReached) {
  constexpr std::size_t kElements = (std::size_t{1} << 31) + 5;
  RepeatedMapping parameter(kElements * 2), master(kElements * 2), exp_avg(kElements * 2), exp_avg_sq(kElements * 2),
      gradient(kElements * 2);
  for (const RepeatedMapping* m : {&parameter, &master, &exp_avg, &exp_avg_sq, &gradient}) {
    if (!m->ok()) GTEST_SKIP() << "this machine does not give 20 GiB of address space in shared mappings";
  }
  AdamArrays arrays;
  arrays.moment_type = ElementType::bf16;
  arrays.gradient_type = ElementType::bf16;
  arrays.parameter = parameter.data();
  arrays.master = master.data();
  arrays.exp_avg = exp_avg.data();
  arrays.exp_avg_sq = exp_avg_sq.data();
  arrays.gradient = gradient.data();
  for (std::size_t i = kElements - 5; i < kElements; ++i) gradient.data()[i] = 0x3F80;
  const AdamHyperparameters h{.learning_rate = 0.5, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8};
  adam(adam_scalars(h, 1, 1.0), arrays, kElements);
  EXPECT_EQ(parameter.data()[kElements - 6], 0);
  for (std::size_t i = kElements - 5; i < kElements; ++i) {
    EXPECT_EQ(parameter.data()[i], 0xBF00) << "element " << i << " moved to -0.5";
  }
  EXPECT_EQ(parameter.data()[kElements], 0);
}

#endif  // BALLAST_TEST_SANITIZED

}  // namespace
}  // namespace ballast::kernels
