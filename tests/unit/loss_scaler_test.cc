// The loss scale: one halving per overflow, growth after good steps, an error where it cannot go lower.
// SPDX-License-Identifier: Apache-2.0
#include "loss_scaler.h"

#include <gtest/gtest.h>

#include <cmath>

namespace ballast::engine {
namespace {

Config::LossScale dynamic(double start, std::uint32_t growth_steps = 2000) {
  return {Config::LossScale::Kind::dynamic, start, growth_steps};
}

TEST(LossScalerTest, EachOverflowHalvesOnceDownToOneAndThenBecomesAnError) {
  LossScaler scaler(dynamic(65536));
  for (int attempt = 1; attempt <= 16; ++attempt) {
    EXPECT_EQ(scaler.scale(), 65536 / std::pow(2.0, attempt - 1));
    scaler.overflow();
  }
  EXPECT_EQ(scaler.scale(), 1);
  for (std::uint32_t k = 1; k < LossScaler::kOverflowsAtOne; ++k) scaler.overflow();
  EXPECT_THROW(scaler.overflow(), UsageError);
}

TEST(LossScalerTest, GrowsByTwoAfterGoodStepsInARowOnly) {
  LossScaler scaler(dynamic(1024, 3));
  scaler.good_step();
  scaler.good_step();
  EXPECT_EQ(scaler.scale(), 1024);
  scaler.good_step();
  EXPECT_EQ(scaler.scale(), 2048);
  scaler.good_step();
  scaler.good_step();
  scaler.overflow();
  EXPECT_EQ(scaler.scale(), 1024);
  scaler.good_step();
  scaler.good_step();
  EXPECT_EQ(scaler.scale(), 1024) << "the overflow began the row anew";
  scaler.good_step();
  EXPECT_EQ(scaler.scale(), 2048);
}

// DeepSpeed's delayed_shift: of so many overflows since the last doubling all but the last leave the scale alone.
TEST(LossScalerTest, WithAHysteresisTheFirstOverflowsOnlyCount) {
  Config::LossScale config = dynamic(1024, 3);
  config.hysteresis = 3;
  config.minimum = 256;
  LossScaler scaler(config);
  scaler.overflow();
  scaler.good_step();
  scaler.overflow();
  EXPECT_EQ(scaler.scale(), 1024);
  LossScaler resumed(config);
  resumed.restore(scaler.state());
  resumed.overflow();
  EXPECT_EQ(resumed.scale(), 512) << "what was borne is part of the state";
  scaler.overflow();
  scaler.overflow();
  EXPECT_EQ(scaler.scale(), 256);
  scaler.overflow();
  EXPECT_EQ(scaler.scale(), 256) << "the minimum";
  for (int i = 0; i < 3; ++i) scaler.good_step();
  EXPECT_EQ(scaler.scale(), 512);
  scaler.overflow();
  scaler.overflow();
  EXPECT_EQ(scaler.scale(), 512) << "counted anew after a doubling";
  scaler.overflow();
  EXPECT_EQ(scaler.scale(), 256);
}

TEST(LossScalerTest, AConsecutiveHysteresisIsCountedAnewAfterEveryGoodStep) {
  Config::LossScale config = dynamic(1024, 100);
  config.hysteresis = 2;
  config.consecutive_hysteresis = true;
  LossScaler scaler(config);
  for (int i = 0; i < 5; ++i) {
    scaler.overflow();
    scaler.good_step();
  }
  EXPECT_EQ(scaler.scale(), 1024);
  scaler.overflow();
  scaler.overflow();
  EXPECT_EQ(scaler.scale(), 512);
}

TEST(LossScalerTest, AGoodStepForgetsOverflowsAtOne) {
  LossScaler scaler(dynamic(1));
  for (int round = 0; round < 5; ++round) {
    for (std::uint32_t k = 1; k < LossScaler::kOverflowsAtOne; ++k) scaler.overflow();
    scaler.good_step();
  }
  EXPECT_EQ(scaler.scale(), 1);
}

TEST(LossScalerTest, AStartThatIsNoPowerOfTwoEndsAtOneExactly) {
  LossScaler scaler(dynamic(3));
  scaler.overflow();
  EXPECT_EQ(scaler.scale(), 1.5);
  scaler.overflow();
  EXPECT_EQ(scaler.scale(), 1);
}

TEST(LossScalerTest, AFixedScaleStaysAndNoneIsOne) {
  LossScaler fixed({Config::LossScale::Kind::fixed, 128});
  for (int k = 0; k < 100; ++k) fixed.overflow();
  for (int k = 0; k < 5000; ++k) fixed.good_step();
  EXPECT_EQ(fixed.scale(), 128);
  EXPECT_FALSE(fixed.dynamic());
  EXPECT_EQ(LossScaler({Config::LossScale::Kind::none, 128}).scale(), 1);
}

TEST(LossScalerTest, GrowthStopsBeforeTheScaleOverflows) {
  LossScaler scaler(dynamic(1, 1));
  for (int k = 0; k < 5000; ++k) scaler.good_step();
  EXPECT_EQ(scaler.scale(), 0x1p60);
}

}  // namespace
}  // namespace ballast::engine
