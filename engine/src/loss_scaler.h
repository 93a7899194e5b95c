// LossScaler: the scale of the loss, fixed or dynamic. Dynamic: halved by overflows, doubled after so many good steps
// in a row (2,000), never below the minimum (1; there overflows are counted and become an error). With a hysteresis the
// first overflows only count, as in DeepSpeed's DynamicLossScaler. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/error.h>
#include <ballast/engine/config.h>

#include <cstdint>

namespace ballast::engine {

class LossScaler {
 public:
  static constexpr std::uint32_t kOverflowsAtOne = 20;

  explicit LossScaler(const Config::LossScale& config)
      : config_(config),
        dynamic_(config.kind == Config::LossScale::Kind::dynamic),
        scale_(config.kind == Config::LossScale::Kind::none ? 1.0 : config.value) {}

  // What a later run goes on with.
  struct State {
    double scale = 1;
    std::uint32_t good_steps = 0;
    std::uint32_t overflows_at_one = 0;
    std::uint32_t overflows_borne = 0;  // of the hysteresis
  };
  State state() const { return {scale_, good_steps_, overflows_at_one_, overflows_borne_}; }
  void restore(const State& state) {
    scale_ = state.scale;
    good_steps_ = state.good_steps;
    overflows_at_one_ = state.overflows_at_one;
    overflows_borne_ = state.overflows_borne;
  }

  double scale() const { return scale_; }
  bool dynamic() const { return dynamic_; }
  void good_step() {
    overflows_at_one_ = 0;
    if (config_.consecutive_hysteresis) overflows_borne_ = 0;
    if (!dynamic_ || ++good_steps_ < config_.growth_steps) return;
    good_steps_ = 0;
    overflows_borne_ = 0;
    if (scale_ < 0x1p60) scale_ *= 2;
  }
  // Throws UsageError once the scale cannot go lower and steps keep overflowing.
  void overflow() {
    good_steps_ = 0;
    if (!dynamic_) return;
    if (overflows_borne_ + 1 < config_.hysteresis) {
      ++overflows_borne_;
    } else if (scale_ > config_.minimum) {
      scale_ = scale_ / 2 < config_.minimum ? config_.minimum : scale_ / 2;
    } else if (++overflows_at_one_ >= kOverflowsAtOne) {
      throw UsageError(
          "gradients were not finite for 20 steps in a row at the smallest loss scale; the model has diverged: lower "
          "the learning rate or look for the operation that makes them");
    }
  }

 private:
  Config::LossScale config_;
  bool dynamic_;
  double scale_;
  std::uint32_t good_steps_ = 0;
  std::uint32_t overflows_at_one_ = 0;
  std::uint32_t overflows_borne_ = 0;
};

}  // namespace ballast::engine
