// Config: what a user may set. Read from JSON (unknown keys and senseless values are errors that say what would do) or
// filled in by hand; either way validate() has the last word.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ballast {

struct DeepSpeedFile;  // <ballast/engine/deepspeed.h>

enum class DataType : std::uint8_t { bf16, fp16, fp32 };
enum class MomentType : std::uint8_t { fp32, bf16, int8 };
enum class Tier : std::uint8_t { device, host, nvme };
enum class Timing : std::uint8_t { automatic, eager, just_in_time, after_backward };

std::string_view to_string(DataType type);
std::string_view to_string(MomentType type);
std::string_view to_string(Tier tier);
std::string_view to_string(Timing timing);
constexpr std::uint64_t element_bytes(DataType type) { return type == DataType::fp32 ? 4 : 2; }
// Of one moment of that many elements, in whole blocks of 256 where it is int8: 256 bytes and an fp32 scale each.
constexpr std::uint64_t moment_bytes(MomentType type, std::uint64_t elements) {
  if (type == MomentType::int8) return (elements + 255) / 256 * 260;
  return elements * (type == MomentType::fp32 ? 4 : 2);
}

struct Config {
  int zero_stage = 3;
  std::string device = "auto";  // auto | host | cuda
  struct Budget {
    std::uint64_t device_bytes = std::uint64_t{2} << 30;
    std::uint64_t host_bytes = std::uint64_t{8} << 30;
  } budget;
  struct Nvme {
    std::vector<std::string> paths = {"run"};
    std::uint64_t block_bytes = std::uint64_t{1} << 20;
    std::uint32_t queue_depth = 32;
    std::string backend = "auto";  // auto | io_uring | threads
  } nvme;
  struct Placement {
    bool automatic = true;  // else the three tiers below
    Tier parameters = Tier::nvme;
    Tier gradients = Tier::host;
    Tier optimizer = Tier::nvme;
  } placement;
  struct Precision {
    DataType parameters = DataType::bf16;
    DataType gradients = DataType::fp32;  // fp32 or bf16
    MomentType moments = MomentType::fp32;
  } precision;
  struct Optimizer {
    std::string type = "adamw";  // adam (L2) | adamw (decoupled)
    double learning_rate = 3e-4;
    double beta1 = 0.9;
    double beta2 = 0.95;
    double epsilon = 1e-8;
    double weight_decay = 0.1;
    Timing timing = Timing::automatic;
    std::optional<double> clip_global_norm = 1.0;
  } optimizer;
  // DeepSpeed's schedules, by its names: functions of the number of updates made before, so that a run that is gone on
  // with has the same rates. Discarded steps do not count.
  struct LearningRateSchedule {
    std::string type = "constant";        // constant | WarmupLR | WarmupDecayLR | WarmupCosineLR
    std::string warmup_type = "log";      // log | linear
    double warmup_min_lr = 0;             // WarmupLR, WarmupDecayLR
    std::optional<double> warmup_max_lr;  // the same; nothing: optimizer.learning_rate
    double warmup_min_ratio = 0;          // WarmupCosineLR: of optimizer.learning_rate, as is the next
    double cos_min_ratio = 0.0001;
    std::uint64_t warmup_num_steps = 1000;
    std::optional<std::uint64_t> total_num_steps;  // WarmupDecayLR and WarmupCosineLR must have it when training begins
    bool needs_total() const { return (type == "WarmupDecayLR" || type == "WarmupCosineLR") && !total_num_steps; }
  } learning_rate_schedule;
  struct LossScale {
    enum class Kind : std::uint8_t { none, dynamic, fixed } kind = Kind::none;
    double value = 65536.0;  // the fixed scale, or where a dynamic one starts
    // Of a dynamic one: doubled after so many good steps in a row; lowered by the hysteresis-th overflow (counted anew
    // after a doubling, or after every good step where `consecutive_hysteresis`) and every further one; never below.
    std::uint32_t growth_steps = 2000;
    std::uint32_t hysteresis = 1;
    bool consecutive_hysteresis = false;
    double minimum = 1;
  } loss_scale;
  struct Durability {
    std::uint64_t every_steps = 0;  // 0: none
  } durability;
  std::optional<int> threads;  // nothing: from affinity and cgroup quota
  struct Communication {
    std::string backend = "auto";  // auto | single | mpi | nccl
    double timeout_seconds = 300;
    int shard_group_size = 0;
  } communication;
  // Where the configuration was read from a DeepSpeed file: what became of each of its keys. No part of to_json().
  std::shared_ptr<const DeepSpeedFile> deepspeed;

  // The rate of the update that `updates` were made before: optimizer.learning_rate, or what the schedule says.
  // Throws ConfigError where that needs total_num_steps and has none.
  double learning_rate(std::uint64_t updates) const;

  // A DeepSpeed configuration is read too, recognised by its keys.
  // Throws ConfigError naming the file, the key, the value and the range, or the nearest known key.
  static Config from_file(const std::string& path);
  static Config from_json(std::string_view text, const std::string& name = "configuration");
  // overrides are dotted key and value; a value is JSON where it parses as JSON, a string (or, for a list, strings
  // separated by commas) otherwise.
  static Config from_file(const std::string& path, const std::vector<std::pair<std::string, std::string>>& overrides);
  static Config from_json(std::string_view text, const std::string& name,
                          const std::vector<std::pair<std::string, std::string>>& overrides);
  std::string to_json() const;  // round-trips
  void validate() const;
};

}  // namespace ballast
