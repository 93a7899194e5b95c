// What values a configuration may have, whoever filled it in.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/base/error.h>
#include <ballast/base/size.h>
#include <ballast/engine/config.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <initializer_list>

#include "json_value.h"

namespace ballast {
namespace {

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.17g", value);
  char shorter[32];
  std::snprintf(shorter, sizeof shorter, "%.15g", value);
  return std::strtod(shorter, nullptr) == value ? shorter : text;
}

void require(bool holds, const std::string& text) {
  if (!holds) throw ConfigError(text);
}

void in_range(const char* key, double value, bool holds, const char* range) {
  // The updates compute in fp32, where what is larger would be infinite.
  require(std::isfinite(static_cast<float>(value)) && holds,
          std::string(key) + " must be " + range + ", not " + number_text(value));
}

void one_of(const char* key, const std::string& value, std::initializer_list<std::string_view> choices) {
  if (std::find(choices.begin(), choices.end(), value) != choices.end()) return;
  std::string wanted;
  for (const std::string_view choice : choices) wanted += (wanted.empty() ? "\"" : ", \"") + std::string(choice) + "\"";
  throw ConfigError(std::string(key) + " must be one of " + wanted + ", not " + json::printable(value));
}

void validate_nvme(const Config::Nvme& nvme) {
  require(!nvme.paths.empty(), "nvme.paths must name at least one directory");
  std::vector<std::filesystem::path> seen;
  for (const std::string& path : nvme.paths) {
    require(!path.empty(), "nvme.paths holds an empty path");
    require(path.find('\0') == path.npos, "nvme.paths holds a path with a zero byte: " + json::printable(path));
    std::filesystem::path normal = (std::filesystem::path(path) / "").lexically_normal();
    require(std::find(seen.begin(), seen.end(), normal) == seen.end(),
            "nvme.paths names " + json::printable(path) + " twice; each path is one drive's directory");
    seen.push_back(std::move(normal));
  }
  require(
      nvme.block_bytes >= 4 * base::kKiB && nvme.block_bytes % (4 * base::kKiB) == 0 && nvme.block_bytes <= base::kGiB,
      "nvme.block_size must be a multiple of 4KiB from 4KiB to 1GiB, not " + base::format_size(nvme.block_bytes));
  require(nvme.queue_depth >= 1 && nvme.queue_depth <= 4096,
          "nvme.queue_depth must be from 1 to 4096, not " + std::to_string(nvme.queue_depth));
  one_of("nvme.backend", nvme.backend, {"auto", "io_uring", "threads"});
}

void validate_optimizer(const Config::Optimizer& optimizer) {
  one_of("optimizer.type", optimizer.type, {"adam", "adamw"});
  in_range("optimizer.learning_rate", optimizer.learning_rate, optimizer.learning_rate >= 0,
           "a finite number, 0 or more");
  in_range("optimizer.betas", optimizer.beta1, optimizer.beta1 >= 0 && optimizer.beta1 < 1,
           "two numbers from 0 up to, not including, 1");
  in_range("optimizer.betas", optimizer.beta2, optimizer.beta2 >= 0 && optimizer.beta2 < 1,
           "two numbers from 0 up to, not including, 1");
  in_range("optimizer.epsilon", optimizer.epsilon, optimizer.epsilon > 0, "a finite number above 0");
  in_range("optimizer.weight_decay", optimizer.weight_decay, optimizer.weight_decay >= 0, "a finite number, 0 or more");
  if (optimizer.clip_global_norm)
    in_range("optimizer.clip_global_norm", *optimizer.clip_global_norm, *optimizer.clip_global_norm > 0,
             "a finite number above 0 (null for no clipping)");
}

void validate_schedule(const Config::LearningRateSchedule& schedule) {
  one_of("learning_rate_schedule.type", schedule.type, {"constant", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"});
  one_of("learning_rate_schedule.warmup_type", schedule.warmup_type, {"log", "linear"});
  for (const auto& [key, value] : {std::pair{"learning_rate_schedule.warmup_min_lr", schedule.warmup_min_lr},
                                   {"learning_rate_schedule.warmup_max_lr", schedule.warmup_max_lr.value_or(0)},
                                   {"learning_rate_schedule.warmup_min_ratio", schedule.warmup_min_ratio},
                                   {"learning_rate_schedule.cos_min_ratio", schedule.cos_min_ratio}})
    in_range(key, value, value >= 0, "a finite number, 0 or more");
  if (schedule.type != "WarmupCosineLR" || !schedule.total_num_steps) return;
  const std::uint64_t warmup = std::max<std::uint64_t>(2, schedule.warmup_num_steps);
  require(*schedule.total_num_steps > warmup,
          "learning_rate_schedule.total_num_steps is " + std::to_string(*schedule.total_num_steps) +
              ", which leaves WarmupCosineLR no step after its warm-up of " + std::to_string(warmup) +
              "; set more of them, or a smaller learning_rate_schedule.warmup_num_steps");
}

void validate_loss_scale(const Config::LossScale& scale) {
  if (scale.kind == Config::LossScale::Kind::none) return;
  in_range("loss_scale", scale.value, scale.value > 0,
           "\"none\", \"dynamic\", an object of a dynamic one's keys, or a finite number above 0");
  if (scale.kind == Config::LossScale::Kind::fixed) return;
  require(scale.growth_steps >= 1, "loss_scale.growth_steps must be 1 or more, not 0");
  require(scale.hysteresis >= 1 && scale.hysteresis <= 1000,
          "loss_scale.hysteresis must be from 1 to 1000, not " + std::to_string(scale.hysteresis));
  in_range("loss_scale.minimum", scale.minimum, scale.minimum > 0 && scale.minimum <= scale.value,
           "above 0 and at most the initial scale");
}

}  // namespace

std::string_view to_string(DataType type) {
  switch (type) {
    case DataType::bf16:
      return "bf16";
    case DataType::fp16:
      return "fp16";
    case DataType::fp32:
      return "fp32";
  }
  BALLAST_CHECK(false);
  return "";
}

std::string_view to_string(MomentType type) {
  switch (type) {
    case MomentType::fp32:
      return "fp32";
    case MomentType::bf16:
      return "bf16";
    case MomentType::int8:
      return "int8";
  }
  BALLAST_CHECK(false);
  return "";
}

std::string_view to_string(Tier tier) {
  switch (tier) {
    case Tier::device:
      return "device";
    case Tier::host:
      return "host";
    case Tier::nvme:
      return "nvme";
  }
  BALLAST_CHECK(false);
  return "";
}

std::string_view to_string(Timing timing) {
  switch (timing) {
    case Timing::automatic:
      return "auto";
    case Timing::eager:
      return "eager";
    case Timing::just_in_time:
      return "just_in_time";
    case Timing::after_backward:
      return "after_backward";
  }
  BALLAST_CHECK(false);
  return "";
}

void Config::validate() const {
  require(zero_stage >= 0 && zero_stage <= 3, "zero_stage must be from 0 to 3, not " + std::to_string(zero_stage));
  one_of("device", device, {"auto", "host", "cuda"});
  require(budget.device_bytes > 0, "budget.device must be above 0");
  require(budget.host_bytes > 0, "budget.host must be above 0");
  validate_nvme(nvme);
  require(precision.gradients != DataType::fp16, "precision.gradients must be \"fp32\" or \"bf16\", not \"fp16\"");
  validate_optimizer(optimizer);
  validate_schedule(learning_rate_schedule);
  validate_loss_scale(loss_scale);
  if (optimizer.timing == Timing::eager) {
    require(!optimizer.clip_global_norm,
            "optimizer.timing \"eager\" updates before the global norm is known, so it cannot go with "
            "optimizer.clip_global_norm; set that to null, or use \"just_in_time\"");
    require(loss_scale.kind != LossScale::Kind::dynamic,
            "optimizer.timing \"eager\" updates before it is known that the gradients are finite, so it cannot go with "
            "loss_scale \"dynamic\"; use \"just_in_time\"");
  }
  require(!threads || (*threads >= 1 && *threads <= 1024),
          "threads must be \"auto\" or from 1 to 1024, not " + std::to_string(threads.value_or(0)));
  one_of("communication.backend", communication.backend, {"auto", "single", "mpi", "nccl"});
  in_range("communication.timeout_seconds", communication.timeout_seconds,
           communication.timeout_seconds > 0 && communication.timeout_seconds <= 1e7, "above 0 and at most 1e7");
  in_range("communication.shard_group_size", communication.shard_group_size, communication.shard_group_size >= 0,
           "0 (all ranks) or more");
}

}  // namespace ballast
