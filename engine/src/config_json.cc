// Config to and from JSON, and the dotted overrides of the command line.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/base/size.h>
#include <ballast/engine/config.h>
#include <ballast/engine/deepspeed.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "deepspeed.h"
#include "json_value.h"
#include "nearest_key.h"

namespace ballast {
namespace {

using json::Value;
using Kind = Value::Kind;

constexpr std::array<std::string_view, 49> kKeys = {"zero_stage",
                                                    "device",
                                                    "budget",
                                                    "budget.device",
                                                    "budget.host",
                                                    "nvme",
                                                    "nvme.paths",
                                                    "nvme.block_size",
                                                    "nvme.queue_depth",
                                                    "nvme.backend",
                                                    "placement",
                                                    "placement.parameters",
                                                    "placement.gradients",
                                                    "placement.optimizer",
                                                    "precision",
                                                    "precision.parameters",
                                                    "precision.gradients",
                                                    "precision.moments",
                                                    "optimizer",
                                                    "optimizer.type",
                                                    "optimizer.learning_rate",
                                                    "optimizer.betas",
                                                    "optimizer.epsilon",
                                                    "optimizer.weight_decay",
                                                    "optimizer.timing",
                                                    "optimizer.clip_global_norm",
                                                    "learning_rate_schedule",
                                                    "learning_rate_schedule.type",
                                                    "learning_rate_schedule.warmup_type",
                                                    "learning_rate_schedule.warmup_min_lr",
                                                    "learning_rate_schedule.warmup_max_lr",
                                                    "learning_rate_schedule.warmup_min_ratio",
                                                    "learning_rate_schedule.cos_min_ratio",
                                                    "learning_rate_schedule.warmup_num_steps",
                                                    "learning_rate_schedule.total_num_steps",
                                                    "loss_scale",
                                                    "loss_scale.initial",
                                                    "loss_scale.growth_steps",
                                                    "loss_scale.hysteresis",
                                                    "loss_scale.consecutive_hysteresis",
                                                    "loss_scale.minimum",
                                                    "durability",
                                                    "durability.every",
                                                    "threads",
                                                    "communication",
                                                    "communication.backend",
                                                    "communication.timeout_seconds",
                                                    "communication.shard_group_size"};

[[noreturn]] void unknown_key(const std::string& where, std::string_view key) {
  throw ConfigError(where + ": unknown key " + json::printable(key) + "; the nearest known key is \"" +
                    std::string(nearest_key(key, kKeys)) + "\"");
}

// One object of the configuration: takes its known keys, then refuses what is left.
class Section {
 public:
  Section(const Value& value, std::string prefix) : value_(value), prefix_(std::move(prefix)) {
    if (value.kind != Kind::object)
      throw ConfigError(value.where + ": " + (prefix_.empty() ? "the configuration" : prefix_) +
                        " must be an object of keys, not " + json::describe(value));
  }

  const Value* find(std::string_view name) {
    taken_.push_back(name);
    return value_.find(name);
  }
  std::string key(std::string_view name) const { return (prefix_.empty() ? "" : prefix_ + ".") + std::string(name); }
  void refuse_the_rest() const {
    for (std::size_t i = 0; i < value_.keys.size(); ++i)
      if (std::find(taken_.begin(), taken_.end(), value_.keys[i]) == taken_.end())
        unknown_key(value_.items[i].where, key(value_.keys[i]));
  }
  [[noreturn]] void fail(std::string_view name, const Value& value, const std::string& wanted) const {
    throw ConfigError(value.where + ": " + key(name) + " must be " + wanted + ", not " + json::describe(value));
  }

  void size(std::string_view name, std::uint64_t* out) {
    const Value* value = find(name);
    if (value == nullptr) return;
    if (value->kind == Kind::number)
      fail(name, *value, "a size with a unit, such as \"512MiB\" (" + value->text.substr(0, 40) + " of what?)");
    const auto bytes = value->kind == Kind::string ? base::parse_size(value->text) : std::nullopt;
    if (!bytes) fail(name, *value, "a size with a unit, such as \"512MiB\" or \"8GiB\"");
    *out = *bytes;
  }
  template <typename Integer>
  void integer(std::string_view name, std::int64_t low, std::int64_t high, Integer* out) {
    const Value* value = find(name);
    if (value == nullptr) return;
    *out = static_cast<Integer>(whole(name, *value, low, high));
  }
  std::int64_t whole(std::string_view name, const Value& value, std::int64_t low, std::int64_t high) const {
    const auto number = value.kind == Kind::number ? json::exact_integer(value.text) : std::nullopt;
    if (!number || *number < low || *number > high)
      fail(name, value, "a whole number from " + std::to_string(low) + " to " + std::to_string(high));
    return *number;
  }
  void number(std::string_view name, double* out) {
    if (const Value* value = find(name)) *out = real(name, *value);
  }
  double real(std::string_view name, const Value& value) const {
    const auto number = value.kind == Kind::number ? json::to_double(value.text) : std::nullopt;
    if (!number && value.kind == Kind::number) fail(name, value, "0 or further from 0 than 1e-307");
    if (!number) fail(name, value, "a number");
    return *number;
  }
  void boolean(std::string_view name, bool* out) {
    const Value* value = find(name);
    if (value == nullptr) return;
    if (value->kind != Kind::boolean) fail(name, *value, "true or false");
    *out = value->boolean;
  }
  void text(std::string_view name, std::string* out) {
    const Value* value = find(name);
    if (value == nullptr) return;
    if (value->kind != Kind::string) fail(name, *value, "a string");
    *out = value->text;
  }
  template <typename Enum>
  void choice(std::string_view name, std::initializer_list<Enum> choices, Enum* out) {
    const Value* value = find(name);
    if (value == nullptr) return;
    std::string wanted;
    for (const Enum each : choices) {
      if (value->kind == Kind::string && value->text == to_string(each)) {
        *out = each;
        return;
      }
      wanted += (wanted.empty() ? "\"" : ", \"") + std::string(to_string(each)) + "\"";
    }
    fail(name, *value, "one of " + wanted);
  }

 private:
  const Value& value_;
  std::string prefix_;
  std::vector<std::string_view> taken_;
};

void read_nvme(Section section, Config::Nvme* nvme) {
  if (const Value* paths = section.find("paths")) {
    if (paths->kind != Kind::array) section.fail("paths", *paths, "a list of directories");
    nvme->paths.clear();
    for (const Value& path : paths->items) {
      if (path.kind != Kind::string) section.fail("paths", path, "a list of directories");
      nvme->paths.push_back(path.text);
    }
  }
  section.size("block_size", &nvme->block_bytes);
  section.integer("queue_depth", 1, 4096, &nvme->queue_depth);
  section.text("backend", &nvme->backend);
  section.refuse_the_rest();
}

void read_placement(const Value& value, Config::Placement* placement) {
  if (value.kind == Kind::string && value.text == "auto") {
    placement->automatic = true;
    return;
  }
  if (value.kind != Kind::object)
    throw ConfigError(value.where +
                      ": placement must be \"auto\" or an object with a tier for parameters, gradients "
                      "and optimizer, not " +
                      json::describe(value));
  Section section(value, "placement");
  placement->automatic = false;
  const auto tiers = {Tier::device, Tier::host, Tier::nvme};
  section.choice("parameters", tiers, &placement->parameters);
  section.choice("gradients", tiers, &placement->gradients);
  section.choice("optimizer", tiers, &placement->optimizer);
  section.refuse_the_rest();
  for (const std::string_view name : {"parameters", "gradients", "optimizer"})
    if (value.find(name) == nullptr)
      throw ConfigError(value.where + ": placement." + std::string(name) +
                        " is missing: an explicit placement names a "
                        "tier (\"device\", \"host\" or \"nvme\") for parameters, gradients and optimizer");
}

void read_precision(Section section, Config::Precision* precision) {
  section.choice("parameters", {DataType::bf16, DataType::fp16, DataType::fp32}, &precision->parameters);
  section.choice("gradients", {DataType::fp32, DataType::bf16}, &precision->gradients);
  section.choice("moments", {MomentType::fp32, MomentType::bf16, MomentType::int8}, &precision->moments);
  section.refuse_the_rest();
}

void read_optimizer(Section section, Config::Optimizer* optimizer) {
  section.text("type", &optimizer->type);
  section.number("learning_rate", &optimizer->learning_rate);
  if (const Value* betas = section.find("betas")) {
    if (betas->kind != Kind::array || betas->items.size() != 2) section.fail("betas", *betas, "a list of two numbers");
    optimizer->beta1 = section.real("betas", betas->items[0]);
    optimizer->beta2 = section.real("betas", betas->items[1]);
  }
  section.number("epsilon", &optimizer->epsilon);
  section.number("weight_decay", &optimizer->weight_decay);
  section.choice("timing", {Timing::automatic, Timing::eager, Timing::just_in_time, Timing::after_backward},
                 &optimizer->timing);
  if (const Value* clip = section.find("clip_global_norm")) {
    if (clip->kind == Kind::null) {
      optimizer->clip_global_norm.reset();
    } else {
      if (clip->kind != Kind::number)
        section.fail("clip_global_norm", *clip, "a number above 0, or null for no clipping");
      optimizer->clip_global_norm = section.real("clip_global_norm", *clip);
    }
  }
  section.refuse_the_rest();
}

void read_schedule(const Value& value, Config::LearningRateSchedule* schedule) {
  using Schedule = Config::LearningRateSchedule;
  *schedule = Schedule{};
  if (value.kind == Kind::string && value.text == "constant") return;
  if (value.kind != Kind::object)
    throw ConfigError(value.where + ": learning_rate_schedule must be \"constant\" or an object with a \"type\", not " +
                      json::describe(value));
  Section section(value, "learning_rate_schedule");
  if (section.find("type") == nullptr)
    throw ConfigError(value.where +
                      ": learning_rate_schedule.type is missing: \"constant\", \"WarmupLR\", \"WarmupDecayLR\" or "
                      "\"WarmupCosineLR\"");
  section.text("type", &schedule->type);
  section.text("warmup_type", &schedule->warmup_type);
  section.number("warmup_min_lr", &schedule->warmup_min_lr);
  if (const Value* most = section.find("warmup_max_lr")) schedule->warmup_max_lr = section.real("warmup_max_lr", *most);
  section.number("warmup_min_ratio", &schedule->warmup_min_ratio);
  section.number("cos_min_ratio", &schedule->cos_min_ratio);
  constexpr std::int64_t kStepsMost = INT64_C(1) << 40;
  section.integer("warmup_num_steps", 0, kStepsMost, &schedule->warmup_num_steps);
  if (const Value* total = section.find("total_num_steps"))
    schedule->total_num_steps = static_cast<std::uint64_t>(section.whole("total_num_steps", *total, 0, kStepsMost));
  section.refuse_the_rest();
  const bool cosine = schedule->type == "WarmupCosineLR";
  for (const char* key : {"warmup_min_lr", "warmup_max_lr", "warmup_min_ratio", "cos_min_ratio", "total_num_steps"}) {
    const std::string_view name = key;
    const bool ratio = name.ends_with("ratio"), total = name == "total_num_steps";
    const bool used = total ? schedule->type != "WarmupLR" : ratio == cosine;
    if (const Value* given = value.find(key); given != nullptr && !used && schedule->type != "constant")
      throw ConfigError(given->where + ": learning_rate_schedule." + key + " has no meaning with the type \"" +
                        schedule->type + "\"; leave it out");
  }
}

void read_loss_scale(const Value& value, Config::LossScale* loss_scale) {
  using Scale = Config::LossScale;
  *loss_scale = Scale{};
  if (value.kind == Kind::string && value.text == "none") return;
  loss_scale->kind = Scale::Kind::dynamic;
  if (value.kind == Kind::string && value.text == "dynamic") return;
  if (value.kind == Kind::number) {
    loss_scale->kind = Scale::Kind::fixed;
    const auto number = json::to_double(value.text);
    if (!number)
      throw ConfigError(value.where + ": loss_scale must be 0 or further from 0 than 1e-307, not " + value.text);
    loss_scale->value = *number;
    return;
  }
  if (value.kind != Kind::object)
    throw ConfigError(value.where +
                      ": loss_scale must be \"none\", \"dynamic\", a number above 0, or an object of a dynamic one's "
                      "keys, not " +
                      json::describe(value));
  Section section(value, "loss_scale");
  section.number("initial", &loss_scale->value);
  section.integer("growth_steps", 1, INT64_C(1) << 31, &loss_scale->growth_steps);
  section.integer("hysteresis", 1, 1000, &loss_scale->hysteresis);
  section.boolean("consecutive_hysteresis", &loss_scale->consecutive_hysteresis);
  section.number("minimum", &loss_scale->minimum);
  section.refuse_the_rest();
}

void read_communication(Section section, Config::Communication* communication) {
  section.text("backend", &communication->backend);
  section.number("timeout_seconds", &communication->timeout_seconds);
  section.integer("shard_group_size", 0, 1 << 20, &communication->shard_group_size);
  section.refuse_the_rest();
}

Config from_value(const Value& value) {
  Config config;
  Section section(value, "");
  section.integer("zero_stage", 0, 3, &config.zero_stage);
  section.text("device", &config.device);
  if (const Value* budget = section.find("budget")) {
    Section sizes(*budget, "budget");
    sizes.size("device", &config.budget.device_bytes);
    sizes.size("host", &config.budget.host_bytes);
    sizes.refuse_the_rest();
  }
  if (const Value* nvme = section.find("nvme")) read_nvme(Section(*nvme, "nvme"), &config.nvme);
  if (const Value* placement = section.find("placement")) read_placement(*placement, &config.placement);
  if (const Value* precision = section.find("precision"))
    read_precision(Section(*precision, "precision"), &config.precision);
  if (const Value* optimizer = section.find("optimizer"))
    read_optimizer(Section(*optimizer, "optimizer"), &config.optimizer);
  if (const Value* schedule = section.find("learning_rate_schedule"))
    read_schedule(*schedule, &config.learning_rate_schedule);
  if (const Value* scale = section.find("loss_scale")) read_loss_scale(*scale, &config.loss_scale);
  if (const Value* durability = section.find("durability")) {
    if (durability->kind == Kind::string && (durability->text == "none" || durability->text == "step")) {
      config.durability.every_steps = durability->text == "step" ? 1 : 0;
    } else if (durability->kind == Kind::object) {
      Section every(*durability, "durability");
      every.integer("every", 1, INT64_C(1) << 40, &config.durability.every_steps);
      every.refuse_the_rest();
      if (config.durability.every_steps == 0) throw ConfigError(durability->where + ": durability.every is missing");
    } else {
      section.fail("durability", *durability, "\"none\", \"step\" or {\"every\": N}");
    }
  }
  if (const Value* threads = section.find("threads");
      threads != nullptr && !(threads->kind == Kind::string && threads->text == "auto")) {
    if (threads->kind != Kind::number) section.fail("threads", *threads, "\"auto\" or a whole number from 1 to 1024");
    config.threads = static_cast<int>(section.whole("threads", *threads, 1, 1024));
  }
  if (const Value* communication = section.find("communication"))
    read_communication(Section(*communication, "communication"), &config.communication);
  section.refuse_the_rest();
  return config;
}

std::string read_text(const std::string& path) {
  errno = 0;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rbe"), std::fclose);
  if (file == nullptr) throw ConfigError("cannot open the configuration " + path + ": " + std::strerror(errno));
  std::string text(json::kTextBytesMax + 1, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file.get()));
  if (std::ferror(file.get()) != 0)
    throw ConfigError("cannot read the configuration " + path + ": " + std::strerror(errno));
  return text;
}

void stamp(Value* value, const std::string& where) {
  value->where = where;
  for (Value& item : value->items) stamp(&item, where);
}

void apply(Value* root, const std::string& key, const std::string& text) {
  std::string where = "--set " + key.substr(0, 60) + "=" + text.substr(0, 60);
  std::replace_if(
      where.begin(), where.end(), [](char c) { return c < 32 || c > 126; }, '?');
  if (std::find(kKeys.begin(), kKeys.end(), key) == kKeys.end()) unknown_key(where, key);
  Value value;
  bool plain = false;  // not JSON
  try {
    value = json::parse(text, where);
  } catch (const json::NumberTooLarge& error) {
    // It may name a directory all the same.
    if (key != "nvme.paths") throw json::NumberTooLarge(where + ": " + key + " cannot be that: ", error.digits);
    plain = true;
    value.kind = Kind::string;
    value.text = text;
  } catch (const ConfigError&) {
    plain = true;
    value.kind = Kind::string;
    value.text = text;
  }
  if (key == "nvme.paths" && value.kind == Kind::string && !plain) {
    Value list{.kind = Kind::array};
    list.items.push_back(std::move(value));
    value = std::move(list);
  } else if (key == "nvme.paths" && value.kind != Kind::array && value.kind != Kind::object) {
    value = Value{.kind = Kind::array};
    for (std::size_t begin = 0; begin <= text.size();) {
      const std::size_t end = std::min(text.find(',', begin), text.size());
      value.items.push_back(Value{.kind = Kind::string, .text = text.substr(begin, end - begin)});
      begin = end + 1;
    }
  }
  stamp(&value, where);
  Value* target = root;
  for (std::size_t begin = 0; begin <= key.size();) {
    const std::size_t end = std::min(key.find('.', begin), key.size());
    if (target->kind != Kind::object) *target = Value{.kind = Kind::object, .where = where};
    const std::string name = key.substr(begin, end - begin);
    Value* next = target->find(name);
    target = next != nullptr ? next : &target->add(name, Value{.where = where});
    begin = end + 1;
  }
  *target = std::move(value);
}

std::string size_text(std::uint64_t bytes) {
  for (const auto& [unit, name] : {std::pair{base::kGiB, "GiB"}, {base::kMiB, "MiB"}, {base::kKiB, "KiB"}})
    if (bytes > 0 && bytes % unit == 0) return std::to_string(bytes / unit) + name;
  return std::to_string(bytes) + "B";
}

}  // namespace

Config Config::from_json(std::string_view text, const std::string& name,
                         const std::vector<std::pair<std::string, std::string>>& overrides) {
  Value root = json::parse(text, name);
  std::shared_ptr<DeepSpeedFile> file;
  if (deepspeed::recognised(root)) {
    file = std::make_shared<DeepSpeedFile>();
    file->name = name;
    root = deepspeed::translate(root, file.get());
  }
  if (root.kind == Kind::object)
    for (const auto& [key, value] : overrides) apply(&root, key, value);
  Config config = from_value(root);
  config.deepspeed = std::move(file);
  try {
    config.validate();
  } catch (const ConfigError& error) {
    throw ConfigError(name + (overrides.empty() ? ": " : " with --set: ") + error.what());
  }
  return config;
}

Config Config::from_json(std::string_view text, const std::string& name) { return from_json(text, name, {}); }

Config Config::from_file(const std::string& path) { return from_file(path, {}); }

Config Config::from_file(const std::string& path, const std::vector<std::pair<std::string, std::string>>& overrides) {
  return from_json(read_text(path), path, overrides);
}

std::string Config::to_json() const {
  using Json = nlohmann::ordered_json;
  Json out;
  out["zero_stage"] = zero_stage;
  out["device"] = device;
  out["budget"] = Json{{"device", size_text(budget.device_bytes)}, {"host", size_text(budget.host_bytes)}};
  out["nvme"] = Json{{"paths", nvme.paths},
                     {"block_size", size_text(nvme.block_bytes)},
                     {"queue_depth", nvme.queue_depth},
                     {"backend", nvme.backend}};
  if (placement.automatic) {
    out["placement"] = "auto";
  } else {
    out["placement"] = Json{{"parameters", to_string(placement.parameters)},
                            {"gradients", to_string(placement.gradients)},
                            {"optimizer", to_string(placement.optimizer)}};
  }
  out["precision"] = Json{{"parameters", to_string(precision.parameters)},
                          {"gradients", to_string(precision.gradients)},
                          {"moments", to_string(precision.moments)}};
  out["optimizer"] = Json{{"type", optimizer.type},
                          {"learning_rate", optimizer.learning_rate},
                          {"betas", {optimizer.beta1, optimizer.beta2}},
                          {"epsilon", optimizer.epsilon},
                          {"weight_decay", optimizer.weight_decay},
                          {"timing", to_string(optimizer.timing)},
                          {"clip_global_norm", nullptr}};
  if (optimizer.clip_global_norm) out["optimizer"]["clip_global_norm"] = *optimizer.clip_global_norm;
  out["learning_rate_schedule"] = "constant";
  if (const LearningRateSchedule& schedule = learning_rate_schedule; schedule.type != "constant") {
    Json json{{"type", schedule.type},
              {"warmup_type", schedule.warmup_type},
              {"warmup_num_steps", schedule.warmup_num_steps}};
    if (schedule.type == "WarmupCosineLR") {
      json["warmup_min_ratio"] = schedule.warmup_min_ratio;
      json["cos_min_ratio"] = schedule.cos_min_ratio;
    } else {
      json["warmup_min_lr"] = schedule.warmup_min_lr;
      if (schedule.warmup_max_lr) json["warmup_max_lr"] = *schedule.warmup_max_lr;
    }
    if (schedule.type != "WarmupLR" && schedule.total_num_steps) json["total_num_steps"] = *schedule.total_num_steps;
    out["learning_rate_schedule"] = std::move(json);
  }
  switch (loss_scale.kind) {
    case LossScale::Kind::none:
      out["loss_scale"] = "none";
      break;
    case LossScale::Kind::dynamic:
      out["loss_scale"] = Json{{"initial", loss_scale.value},
                               {"growth_steps", loss_scale.growth_steps},
                               {"hysteresis", loss_scale.hysteresis},
                               {"consecutive_hysteresis", loss_scale.consecutive_hysteresis},
                               {"minimum", loss_scale.minimum}};
      if (LossScale plain{LossScale::Kind::dynamic};
          loss_scale.value == plain.value && loss_scale.growth_steps == plain.growth_steps &&
          loss_scale.hysteresis == plain.hysteresis && loss_scale.minimum == plain.minimum &&
          loss_scale.consecutive_hysteresis == plain.consecutive_hysteresis)
        out["loss_scale"] = "dynamic";
      break;
    case LossScale::Kind::fixed:
      out["loss_scale"] = loss_scale.value;
      break;
  }
  if (durability.every_steps == 0) {
    out["durability"] = "none";
  } else if (durability.every_steps == 1) {
    out["durability"] = "step";
  } else {
    out["durability"] = Json{{"every", durability.every_steps}};
  }
  out["threads"] = "auto";
  if (threads) out["threads"] = *threads;
  out["communication"] = Json{{"backend", communication.backend},
                              {"timeout_seconds", communication.timeout_seconds},
                              {"shard_group_size", communication.shard_group_size}};
  return out.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace ballast
