// LossScaler: the scale of the loss, fixed or dynamic. Dynamic: halved by every overflow, doubled after 2,000 good
// steps in a row, never below 1 (there overflows are counted and become an error). SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/error.h>
#include <ballast/engine/config.h>

#include <cstdint>

namespace ballast::engine {

class LossScaler {
 public:
  static constexpr std::uint32_t kGrowthSteps = 2000;
  static constexpr std::uint32_t kOverflowsAtOne = 20;

  explicit LossScaler(const Config::LossScale& config, std::uint32_t growth_steps = kGrowthSteps)
      : dynamic_(config.kind == Config::LossScale::Kind::dynamic),
        scale_(config.kind == Config::LossScale::Kind::none ? 1.0 : config.value),
        growth_steps_(growth_steps) {}

  // What a later run goes on with.
  struct State {
    double scale = 1;
    std::uint32_t good_steps = 0;
    std::uint32_t overflows_at_one = 0;
  };
  State state() const { return {scale_, good_steps_, overflows_at_one_}; }
  void restore(const State& state) {
    scale_ = state.scale;
    good_steps_ = state.good_steps;
    overflows_at_one_ = state.overflows_at_one;
  }

  double scale() const { return scale_; }
  bool dynamic() const { return dynamic_; }
  void good_step() {
    overflows_at_one_ = 0;
    if (!dynamic_ || ++good_steps_ < growth_steps_) return;
    good_steps_ = 0;
    if (scale_ < 0x1p60) scale_ *= 2;
  }
  // Throws UsageError once the scale cannot go lower and steps keep overflowing.
  void overflow() {
    good_steps_ = 0;
    if (!dynamic_) return;
    if (scale_ > 1) {
      scale_ = scale_ / 2 < 1 ? 1 : scale_ / 2;
    } else if (++overflows_at_one_ >= kOverflowsAtOne) {
      throw UsageError(
          "gradients were not finite for 20 steps in a row at loss scale 1; the model has diverged: lower the "
          "learning rate or look for the operation that makes them");
    }
  }

 private:
  bool dynamic_;
  double scale_;
  std::uint32_t growth_steps_;
  std::uint32_t good_steps_ = 0;
  std::uint32_t overflows_at_one_ = 0;
};

}  // namespace ballast::engine
