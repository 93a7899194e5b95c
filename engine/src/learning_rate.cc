// The learning rate of an update, as DeepSpeed's schedules of the same names give it
// (deepspeed/runtime/lr_schedules.py). DeepSpeed steps a schedule after each update, and its iterations count from 0:
// the update that n were made before has the rate of iteration n - 1, and the first one the value before any iteration.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/engine/config.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace ballast {
namespace {

// From 0 to 1 over the warm-up; nothing below 2 steps, whose logarithm would be 0.
double warmed(const Config::LearningRateSchedule& schedule, double iteration, double steps) {
  return schedule.warmup_type == "linear" ? iteration / steps : 1.0 / std::log(steps) * std::log(iteration + 1);
}

}  // namespace

double Config::learning_rate(std::uint64_t updates) const {
  const LearningRateSchedule& schedule = learning_rate_schedule;
  if (schedule.type == "constant") return optimizer.learning_rate;
  if (schedule.needs_total()) {
    throw ConfigError("learning_rate_schedule.total_num_steps is missing, which " + schedule.type +
                      " needs: the number of updates of the whole training");
  }
  const auto warmup = static_cast<double>(std::max<std::uint64_t>(2, schedule.warmup_num_steps));
  const auto total = static_cast<double>(schedule.total_num_steps.value_or(0));
  const double iteration = static_cast<double>(updates) - 1;
  if (schedule.type == "WarmupCosineLR") {
    if (updates == 0) return 0;
    double ratio = 0;
    if (iteration < warmup) {
      ratio = schedule.warmup_min_ratio + warmed(schedule, iteration, warmup) * (1 - schedule.warmup_min_ratio);
    } else {
      const double turn = std::numbers::pi * (iteration - warmup + 1) / (total - warmup);
      ratio = std::max(0.0, schedule.cos_min_ratio + (1 - schedule.cos_min_ratio) * ((1 + std::cos(turn)) / 2));
    }
    return optimizer.learning_rate * ratio;
  }
  if (updates == 0) return schedule.warmup_min_lr;
  double gamma = 1;
  if (iteration < warmup) {
    gamma = warmed(schedule, iteration, warmup);
  } else if (schedule.type == "WarmupDecayLR") {
    gamma = std::max(0.0, (total - iteration) / std::max(1.0, total - warmup));
  }
  const double low = schedule.warmup_min_lr, high = schedule.warmup_max_lr.value_or(optimizer.learning_rate);
  return low + (high - low) * gamma;
}

}  // namespace ballast
