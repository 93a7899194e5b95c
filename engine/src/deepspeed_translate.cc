// From DeepSpeed's keys to ours. What is not given has DeepSpeed's default, so that the numbers are those that
// DeepSpeed would train with; "auto" is as not given. SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <map>
#include <optional>
#include <utility>

#include "deepspeed.h"
#include "nearest_key.h"

namespace ballast::deepspeed {
namespace {

using json::Value;
using Kind = Value::Kind;
using Line = DeepSpeedLine;

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

// As JSON, short: objects and lists only say that they are there.
std::string shown(const Value& value) {
  switch (value.kind) {
    case Kind::null:
      return "null";
    case Kind::boolean:
      return value.boolean ? "true" : "false";
    case Kind::number:
      return value.text.substr(0, 40);
    case Kind::string:
      return json::printable(value.text);
    case Kind::array: {
      std::string text = "[";
      for (const Value& item : value.items) text += (text.size() > 1 ? ", " : "") + shown(item);
      return text.size() < 60 ? text + "]" : "[...]";
    }
    case Kind::object:
      return "{...}";
  }
  return {};
}

// As short as it can be to be read back the same.
std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.15g", value);
  if (json::to_double(text) != value) std::snprintf(text, sizeof text, "%.17g", value);
  return text;
}

bool has(std::initializer_list<std::string_view> names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

class Translator {
 public:
  explicit Translator(const Value& root) : root_(root) {
    out_.kind = Kind::object;
    out_.where = root.where;
  }

  Value run(DeepSpeedFile* file) {
    batch(file);
    zero();
    precision();
    optimizer();
    schedule();
    const auto clip = real("gradient_clipping");
    put("optimizer.clip_global_norm", clip.value_or(0) == 0 ? Value{} : number(*clip, at("gradient_clipping")));
    if (clip)
      became("gradient_clipping", *clip == 0 ? "no clipping" : "optimizer.clip_global_norm " + number_text(*clip));
    communication();
    storage();
    lines(root_, "", file);
    return std::move(out_);
  }

 private:
  // --- reading ------------------------------------------------------------------------------------------------------

  const Value* raw(std::string_view key) const {
    const Value* value = &root_;
    for (std::size_t begin = 0; value != nullptr && begin <= key.size();) {
      const std::size_t end = std::min(key.find('.', begin), key.size());
      value = value->kind == Kind::object ? value->find(key.substr(begin, end - begin)) : nullptr;
      begin = end + 1;
    }
    return value;
  }
  const std::string& at(std::string_view key) const {
    const Value* value = raw(key);
    return value != nullptr ? value->where : root_.where;
  }
  [[noreturn]] void fail(std::string_view key, const std::string& text) const {
    throw ConfigError(at(key) + ": " + std::string(key) + " " + text);
  }
  void note(std::string_view key, std::string text, Line::Outcome outcome) {
    notes_.insert_or_assign(std::string(key), std::pair(std::move(text), outcome));
  }
  void became(std::string_view key, std::string text) { note(key, std::move(text), Line::Outcome::mapped); }

  // Nothing where it is missing, null or "auto".
  const Value* given(std::string_view key) {
    const Value* value = raw(key);
    if (value == nullptr) return nullptr;
    const bool automatic = value->kind == Kind::string && lower(value->text) == "auto";
    if (value->kind != Kind::null && !automatic) return value;
    note(key, "as not given", Line::Outcome::not_given);
    return nullptr;
  }
  const Value* section(std::string_view key) {
    const Value* value = given(key);
    if (value != nullptr && value->kind != Kind::object)
      fail(key, "must be an object of keys, not " + json::describe(*value));
    return value;
  }
  // Tuners write booleans and numbers as strings.
  std::optional<bool> boolean(std::string_view key) {
    const Value* value = given(key);
    if (value == nullptr) return {};
    if (value->kind == Kind::boolean) return value->boolean;
    const std::string text = value->kind == Kind::string || value->kind == Kind::number ? lower(value->text) : "";
    if (text == "true" || text == "1") return true;
    if (text == "false" || text == "0") return false;
    fail(key, "must be true or false, not " + json::describe(*value));
  }
  std::optional<double> real(std::string_view key) {
    const Value* value = given(key);
    if (value == nullptr) return {};
    return real(key, *value);
  }
  double real(std::string_view key, const Value& value) const {
    std::optional<double> number;
    if (value.kind == Kind::number || (value.kind == Kind::string && is_number(value.text)))
      number = json::to_double(value.text);
    if (!number || !std::isfinite(*number)) fail(key, "must be a number, not " + json::describe(value));
    return *number;
  }
  std::optional<std::int64_t> whole(std::string_view key, std::int64_t low, std::int64_t high) {
    const Value* value = given(key);
    if (value == nullptr) return {};
    std::optional<std::int64_t> number;
    if (value->kind == Kind::number || (value->kind == Kind::string && is_number(value->text)))
      number = json::exact_integer(value->text);
    if (!number || *number < low || *number > high)
      fail(key, "must be a whole number from " + std::to_string(low) + " to " + std::to_string(high) + ", not " +
                    json::describe(*value));
    return number;
  }
  static bool is_number(const std::string& text) {
    try {
      return json::parse("[" + text + "]", "").items.at(0).kind == Kind::number;
    } catch (const std::exception&) {
      return false;
    }
  }
  std::optional<std::string> word(std::string_view key) {
    const Value* value = given(key);
    if (value == nullptr) return {};
    if (value->kind != Kind::string) fail(key, "must be a string, not " + json::describe(*value));
    return value->text;
  }

  // --- writing ------------------------------------------------------------------------------------------------------

  static Value string(std::string text, const std::string& where) {
    return {.kind = Kind::string, .text = std::move(text), .where = where};
  }
  static Value number(double value, const std::string& where) {
    return {.kind = Kind::number, .text = number_text(value), .where = where};
  }
  void put(std::string_view key, Value value) {
    if (value.where.empty()) value.where = root_.where;
    Value* target = &out_;
    const std::size_t dot = key.find('.');
    if (dot != key.npos) {
      const std::string name(key.substr(0, dot));
      Value* inner = out_.find(name);
      target = inner != nullptr ? inner : &out_.add(name, Value{.kind = Kind::object, .where = root_.where});
    }
    target->add(std::string(dot == key.npos ? key : key.substr(dot + 1)), std::move(value));
  }

  // --- the parts ----------------------------------------------------------------------------------------------------

  void batch(DeepSpeedFile* file) {
    constexpr std::int64_t kMost = std::int64_t{1} << 24;  // so that the product of all three is none too large
    file->train_batch_size = whole("train_batch_size", 1, std::int64_t{1} << 40);
    file->train_micro_batch_size_per_gpu = whole("train_micro_batch_size_per_gpu", 1, kMost);
    file->gradient_accumulation_steps = whole("gradient_accumulation_steps", 1, kMost);
    if (file->train_batch_size) became("train_batch_size", "--batch of train");
    if (file->train_micro_batch_size_per_gpu)
      became("train_micro_batch_size_per_gpu", "--batch of train, divided by ranks and micro-batches");
    if (file->gradient_accumulation_steps) became("gradient_accumulation_steps", "--micro-batches of train");
  }

  void zero() {
    std::int64_t stage = 0;
    const Value* zero = given("zero_optimization");
    if (zero != nullptr && zero->kind == Kind::boolean) {  // as it was written before there were stages
      stage = zero->boolean ? 1 : 0;
      became("zero_optimization", "zero_stage " + std::to_string(stage));
    } else if (section("zero_optimization") != nullptr) {
      stage = whole("zero_optimization.stage", 0, 3).value_or(0);
      became("zero_optimization.stage", "zero_stage " + std::to_string(stage));
    }
    put("zero_stage", number(static_cast<double>(stage), at("zero_optimization.stage")));
    const std::string optimizer = offload("zero_optimization.offload_optimizer", "optimizer",
                                          boolean("zero_optimization.cpu_offload"), stage > 0);
    if (given("zero_optimization.cpu_offload") != nullptr)
      became("zero_optimization.cpu_offload", "placement.optimizer " + optimizer);
    auto old = boolean("zero_optimization.cpu_offload_param");
    if (const auto older = boolean("zero_optimization.cpu_offload_params")) old = older;
    const std::string parameters = offload("zero_optimization.offload_param", "parameters", old, stage == 3);
    for (const char* key : {"zero_optimization.cpu_offload_param", "zero_optimization.cpu_offload_params"})
      if (given(key) != nullptr) became(key, "placement.parameters " + parameters);
    // Where the optimizer runs there the gradients go.
    put("placement.parameters", string(parameters, at("zero_optimization.offload_param.device")));
    put("placement.gradients", string(optimizer == "device" ? "device" : "host", root_.where));
    put("placement.optimizer", string(optimizer, at("zero_optimization.offload_optimizer.device")));
    if (const auto size = whole("zero_optimization.mics_shard_size", -1, 1 << 20)) {
      became("zero_optimization.mics_shard_size",
             *size > 0 ? "communication.shard_group_size " + std::to_string(*size) : "all ranks share");
      if (*size > 0)
        put("communication.shard_group_size",
            number(static_cast<double>(*size), at("zero_optimization.mics_shard_size")));
    }
  }

  // The tier that `states` go to. `cpu`: the key of before there were sections.
  std::string offload(const std::string& key, const std::string& states, std::optional<bool> cpu, bool honoured) {
    std::string device = cpu.value_or(false) ? "cpu" : "none";
    if (section(key) != nullptr) {
      if (const auto named = word(key + ".device")) device = lower(*named);
      if (!has({"none", "cpu", "nvme"}, device))
        fail(key + ".device", "must be \"none\", \"cpu\" or \"nvme\", not " + json::printable(device));
    }
    std::string tier = device == "cpu" ? "host" : device == "nvme" ? "nvme" : "device";
    std::string text = "placement." + states + " " + tier;
    if (!honoured && tier != "device") {
      tier = "device";
      text = "placement." + states + " device: DeepSpeed offloads it at " +
             (states == "parameters" ? "stage 3" : "stages 1 to 3") + " only";
    }
    if (given(key + ".device") != nullptr) became(key + ".device", text);
    const auto path = word(key + ".nvme_path");
    if (!path) return tier;
    if (tier != "nvme") {
      note(key + ".nvme_path", "nothing lies on NVMe here", Line::Outcome::not_given);
      return tier;
    }
    became(key + ".nvme_path", "nvme.paths " + json::printable(*path));
    if (std::find(paths_.begin(), paths_.end(), *path) == paths_.end()) paths_.push_back(*path);
    paths_at_ = at(key + ".nvme_path");
    return tier;
  }

  void precision() {
    section("fp16");
    const std::string bf16 = raw("bf16") == nullptr && raw("bfloat16") != nullptr ? "bfloat16" : "bf16";
    section(bf16);
    const bool half = boolean("fp16.enabled").value_or(false), brain = boolean(bf16 + ".enabled").value_or(false);
    if (half && brain) fail("fp16.enabled", "and " + bf16 + ".enabled exclude each other");
    const char* type = half ? "fp16" : brain ? "bf16" : "fp32";
    for (const std::string& key : {std::string("fp16.enabled"), bf16 + ".enabled"}) {
      const std::string text = std::string("precision.parameters ") + type;
      if (given(key) != nullptr) {
        became(key, text);
      } else if (raw(key) != nullptr) {
        note(key, "as not given: " + text, Line::Outcome::not_given);
      }
    }
    put("precision.parameters", string(type, at(half ? "fp16.enabled" : bf16 + ".enabled")));
    loss_scale(half);
    section("data_types");
    if (const auto grads = word("data_types.grad_accum_dtype")) {
      const std::string wanted = lower(*grads);
      if (!has({"fp32", "bf16"}, wanted))
        fail("data_types.grad_accum_dtype",
             json::printable(*grads) + " cannot be honoured: gradients are added up in \"fp32\" or \"bf16\"");
      put("precision.gradients", string(wanted, at("data_types.grad_accum_dtype")));
      became("data_types.grad_accum_dtype", "precision.gradients " + wanted);
    }
  }

  void loss_scale(bool enabled) {
    constexpr std::string_view kKeys[] = {"fp16.loss_scale", "fp16.initial_scale_power",    "fp16.loss_scale_window",
                                          "fp16.hysteresis", "fp16.consecutive_hysteresis", "fp16.min_loss_scale"};
    const double fixed = real("fp16.loss_scale").value_or(0);
    const double power = real("fp16.initial_scale_power").value_or(16);
    const auto window = whole("fp16.loss_scale_window", 1, 1 << 30).value_or(1000);
    const auto hysteresis = whole("fp16.hysteresis", 1, 1000).value_or(2);
    const bool consecutive = boolean("fp16.consecutive_hysteresis").value_or(false);
    const double minimum = real("fp16.min_loss_scale").value_or(1);
    const auto unused = [&](const char* why) {
      for (const std::string_view key : kKeys)
        if (given(key) != nullptr && (!enabled || key != "fp16.loss_scale")) note(key, why, Line::Outcome::not_given);
    };
    if (!enabled) return unused("fp16 is not enabled");
    if (fixed != 0) {
      put("loss_scale", number(fixed, at("fp16.loss_scale")));
      became("fp16.loss_scale", "loss_scale " + number_text(fixed));
      return unused("the loss scale is fixed");
    }
    if (minimum < 0) fail("fp16.min_loss_scale", "must be 0 or more, not " + number_text(minimum));
    const double initial = std::exp2(power), lowest = std::max(minimum, 0x1p-60);
    put("loss_scale.initial", number(initial, at("fp16.initial_scale_power")));
    put("loss_scale.growth_steps", number(static_cast<double>(window), at("fp16.loss_scale_window")));
    put("loss_scale.hysteresis", number(static_cast<double>(hysteresis), at("fp16.hysteresis")));
    put("loss_scale.consecutive_hysteresis",
        {.kind = Kind::boolean, .boolean = consecutive, .where = at("fp16.consecutive_hysteresis")});
    put("loss_scale.minimum", number(lowest, at("fp16.min_loss_scale")));
    const std::string texts[] = {"a dynamic loss_scale",
                                 "loss_scale.initial " + number_text(initial),
                                 "loss_scale.growth_steps " + std::to_string(window),
                                 "loss_scale.hysteresis " + std::to_string(hysteresis),
                                 std::string("loss_scale.consecutive_hysteresis ") + (consecutive ? "true" : "false"),
                                 "loss_scale.minimum " + number_text(lowest)};
    for (std::size_t i = 0; i < std::size(kKeys); ++i)
      if (given(kKeys[i]) != nullptr) became(kKeys[i], texts[i]);
  }

  void optimizer() {
    if (section("optimizer") == nullptr) return;  // the trainer's own in DeepSpeed, ours by default here
    const std::string name = word("optimizer.type").value_or("adamw"), type = lower(name);
    if (!has({"adam", "adamw"}, type))
      fail("optimizer.type", json::printable(name) +
                                 " cannot be honoured: Adam and AdamW are what there is, and another "
                                 "optimizer gives other numbers");
    section("optimizer.params");
    const auto refuse = [&](const char* key, bool wrong, const std::string& why) {
      if (wrong) fail(key, "cannot be honoured: " + why);
      if (given(key) != nullptr) became(key, "the same");
    };
    // DeepSpeed's Adam decouples the weight decay, too, unless it is told not to.
    const bool decoupled = boolean("optimizer.params.adam_w_mode").value_or(true) || type == "adamw";
    const std::string ours = decoupled ? "adamw" : "adam";
    put("optimizer.type", string(ours, at("optimizer.type")));
    if (given("optimizer.type") != nullptr)
      became("optimizer.type",
             "optimizer.type " + ours + (type != ours ? " (adam_w_mode is DeepSpeed's default)" : ""));
    if (given("optimizer.params.adam_w_mode") != nullptr)
      became("optimizer.params.adam_w_mode", "optimizer.type " + ours);
    value("optimizer.params.lr", "optimizer.learning_rate", real("optimizer.params.lr"), 1e-3);
    value("optimizer.params.eps", "optimizer.epsilon", real("optimizer.params.eps"), 1e-8);
    value("optimizer.params.weight_decay", "optimizer.weight_decay", real("optimizer.params.weight_decay"), 0);
    Value betas{.kind = Kind::array, .where = at("optimizer.params.betas")};
    if (const Value* list = given("optimizer.params.betas")) {
      if (list->kind != Kind::array || list->items.size() != 2)
        fail("optimizer.params.betas", "must be a list of two numbers, not " + json::describe(*list));
      for (const Value& item : list->items)
        if (lower(item.text) != "auto") betas.items.push_back(number(real("optimizer.params.betas", item), item.where));
      became("optimizer.params.betas", "optimizer.betas " + shown(*list));
    }
    if (betas.items.size() != 2) betas.items = {number(0.9, betas.where), number(0.999, betas.where)};
    put("optimizer.betas", std::move(betas));
    refuse("optimizer.params.bias_correction", !boolean("optimizer.params.bias_correction").value_or(true),
           "the moments' bias is always corrected");
    refuse("optimizer.params.amsgrad", boolean("optimizer.params.amsgrad").value_or(false),
           "there is no AMSGrad variant");
    refuse("optimizer.params.max_grad_norm", real("optimizer.params.max_grad_norm").value_or(0) > 0,
           "DeepSpeed takes none there either; say gradient_clipping");
  }

  void value(const char* key, const char* ours, std::optional<double> given, double otherwise) {
    put(ours, number(given.value_or(otherwise), at(key)));
    if (given) became(key, std::string(ours) + " " + number_text(*given));
  }

  void schedule() {
    if (section("scheduler") == nullptr) return;
    const auto type = word("scheduler.type");
    section("scheduler.params");
    if (!type) return;
    const std::string params = "scheduler.params.", ours = "learning_rate_schedule.";
    const bool cosine = *type == "WarmupCosineLR", decay = *type == "WarmupDecayLR";
    if (!cosine && !decay && *type != "WarmupLR")
      fail("scheduler.type", json::printable(*type) +
                                 " cannot be honoured: WarmupLR, WarmupDecayLR and WarmupCosineLR are what there is, "
                                 "and other learning rates give other numbers");
    put(ours + "type", string(*type, at("scheduler.type")));
    became("scheduler.type", ours + "type " + *type);
    if (whole(params + "last_batch_iteration", -1, INT64_MAX).value_or(-1) != -1)
      fail(params + "last_batch_iteration", "cannot be honoured: a schedule begins with the run, or goes on with it");
    if (given(params + "last_batch_iteration") != nullptr) became(params + "last_batch_iteration", "the same");
    const auto copy = [&](const std::string& name, const std::optional<double>& number_given) {
      if (!number_given) return;
      put(ours + name, number(*number_given, at(params + name)));
      became(params + name, ours + name + " " + number_text(*number_given));
    };
    if (const auto warmup = word(params + "warmup_type")) {
      put(ours + "warmup_type", string(*warmup, at(params + "warmup_type")));
      became(params + "warmup_type", ours + "warmup_type " + *warmup);
    }
    constexpr std::int64_t kStepsMost = std::int64_t{1} << 40;
    const auto steps = [&](const std::string& name) {
      const auto count = whole(params + name, 0, kStepsMost);
      copy(name, count ? std::optional(static_cast<double>(*count)) : std::nullopt);
    };
    steps("warmup_num_steps");
    if (cosine) {
      copy("warmup_min_ratio", real(params + "warmup_min_ratio"));
      copy("cos_min_ratio", real(params + "cos_min_ratio"));
    } else {
      copy("warmup_min_lr", rate(params + "warmup_min_lr"));
      copy("warmup_max_lr", rate(params + "warmup_max_lr"));
      if (raw(params + "warmup_max_lr") != nullptr && given(params + "warmup_max_lr") == nullptr)
        note(params + "warmup_max_lr", "as not given: optimizer.learning_rate", Line::Outcome::not_given);
    }
    if (cosine || decay) {
      steps("total_num_steps");
      if (raw(params + "total_num_steps") != nullptr && given(params + "total_num_steps") == nullptr)
        note(params + "total_num_steps", "as not given: --steps of train", Line::Outcome::not_given);
    }
  }

  // One rate, or a list of them for parameter groups, which must then be one rate.
  std::optional<double> rate(const std::string& key) {
    const Value* value = given(key);
    if (value == nullptr) return {};
    if (value->kind != Kind::array) return real(key);
    std::optional<double> all;
    for (const Value& item : value->items) {
      const double each = real(key, item);
      if (all.value_or(each) != each) fail(key, "cannot be honoured: the groups of one schedule have one rate here");
      all = each;
    }
    return all;
  }

  void communication() {
    if (const auto type = word("communication_data_type")) {
      if (lower(*type) != "fp32")
        fail("communication_data_type",
             json::printable(*type) +
                 " cannot be honoured: gradients are reduced as they are added up (data_types.grad_accum_dtype), and "
                 "rounding them on the way gives other numbers; leave it out");
      if (word("data_types.grad_accum_dtype").value_or("fp32") != "fp32")
        fail("communication_data_type",
             "cannot differ from data_types.grad_accum_dtype: gradients are reduced as they "
             "are added up");
      became("communication_data_type", "precision.gradients fp32");
    }
    if (boolean("fp32_allreduce")) became("fp32_allreduce", "gradients are reduced as they are added up");
    for (const char* key : {"tensor_parallel.autotp_size", "sequence_parallel_size"}) {
      if (const auto size = whole(key, 0, 1 << 20)) {
        if (*size > 1)
          fail(key, std::to_string(*size) +
                        " cannot be honoured: every rank is a data-parallel one, so the batch would "
                        "be another");
        became(key, "the same");
      }
    }
  }

  void storage() {
    if (!paths_.empty()) {
      Value list{.kind = Kind::array, .where = paths_at_};
      for (const std::string& path : paths_) list.items.push_back(string(path, paths_at_));
      put("nvme.paths", std::move(list));
    }
    section("aio");
    if (const auto bytes = whole("aio.block_size", 1, INT64_C(1) << 40)) {
      put("nvme.block_size", string(std::to_string(*bytes) + "B", at("aio.block_size")));
      became("aio.block_size", "nvme.block_size " + std::to_string(*bytes) + "B");
    }
    if (const auto depth = whole("aio.queue_depth", 1, 4096)) {
      put("nvme.queue_depth", number(static_cast<double>(*depth), at("aio.queue_depth")));
      became("aio.queue_depth", "nvme.queue_depth " + std::to_string(*depth));
    }
  }

  // --- what became of each key
  // ----------------------------------------------------------------------------------------

  void lines(const Value& object, const std::string& prefix, DeepSpeedFile* file) {
    for (std::size_t i = 0; i < object.keys.size(); ++i) {
      const Value& value = object.items[i];
      const std::string key = prefix + object.keys[i];
      const auto add = [&](std::string text, Line::Outcome outcome) {
        file->lines.push_back({key, shown(value), std::move(text), outcome});
      };
      const auto same = [&](const auto& entry) { return entry.key == key; };
      if (const auto note = notes_.find(key); note != notes_.end()) {
        add(note->second.first, note->second.second);
      } else if (const auto none = std::find_if(meaningless().begin(), meaningless().end(), same);
                 none != meaningless().end()) {
        add(std::string(none->why), Line::Outcome::without_meaning);
      } else if (const auto other = std::find_if(refused().begin(), refused().end(), same); other != refused().end()) {
        if (value.kind != Kind::null && (other->by_presence || switched_on(value)))
          throw ConfigError(value.where + ": " + key +
                            " cannot be honoured, and the numbers depend on it: " + std::string(other->why));
        add("it is switched off", Line::Outcome::not_given);
      } else if (value.kind == Kind::object && known(key)) {
        lines(value, key + ".", file);
      } else if (known(key)) {
        add("of another type of scheduler or optimizer", Line::Outcome::without_meaning);
      } else {
        refuse_misspelling(key, value);
        add("no key of DeepSpeed that is known here", Line::Outcome::without_meaning);
      }
    }
  }
  static bool known(std::string_view key) {
    return std::find(translated().begin(), translated().end(), key) != translated().end();
  }
  static bool switched_on(const Value& value) {
    if (value.kind == Kind::boolean) return value.boolean;
    if (value.kind == Kind::string) return lower(value.text) == "true";
    if (value.kind != Kind::object) return false;
    if (const Value* enabled = value.find("enabled")) return switched_on(*enabled);
    return std::any_of(value.items.begin(), value.items.end(),
                       [](const Value& item) { return item.kind == Kind::object && switched_on(item); });
  }
  // DeepSpeed ignores such a key, and trains otherwise than its writer meant.
  static void refuse_misspelling(const std::string& key, const Value& value) {
    std::vector<std::string_view> all(translated().begin(), translated().end());
    for (const Meaningless& each : meaningless()) all.push_back(each.key);
    for (const Refused& each : refused()) all.push_back(each.key);
    const std::string_view nearest = nearest_key(key, all);
    if (is_misspelling(key, nearest))
      throw ConfigError(value.where + ": unknown key " + json::printable(key) +
                        "; the nearest known key of DeepSpeed is \"" + std::string(nearest) + "\"");
  }

  const Value& root_;
  Value out_;
  std::map<std::string, std::pair<std::string, Line::Outcome>> notes_;
  std::vector<std::string> paths_;
  std::string paths_at_;
};

// First parts of the keys that only one of the two has. "optimizer" is in both; only DeepSpeed's has "params".
bool of_deepspeed(std::string_view name) {
  const auto top = [&](std::string_view key) { return key == name; };
  return name != "optimizer" &&
         (std::any_of(translated().begin(), translated().end(), top) ||
          std::any_of(meaningless().begin(), meaningless().end(), [&](const auto& each) { return top(each.key); }) ||
          std::any_of(refused().begin(), refused().end(), [&](const auto& each) { return top(each.key); }));
}

}  // namespace

bool recognised(const Value& root) {
  if (root.kind != Kind::object) return false;
  const Value* optimizer = root.find("optimizer");
  const bool params = optimizer != nullptr && optimizer->kind == Kind::object && optimizer->find("params") != nullptr;
  std::string theirs = params ? "optimizer.params" : "";
  const Value* ours_at = nullptr;
  std::string ours;
  for (std::size_t i = 0; i < root.keys.size(); ++i) {
    const std::string& name = root.keys[i];
    if (theirs.empty() && of_deepspeed(name)) theirs = name;
    if (ours.empty() && has({"zero_stage", "device", "budget", "nvme", "placement", "precision", "loss_scale",
                             "durability", "threads", "communication", "learning_rate_schedule"},
                            name)) {
      ours = name;
      ours_at = &root.items[i];
    }
  }
  if (optimizer != nullptr && optimizer->kind == Kind::object && ours.empty()) {
    for (std::size_t i = 0; i < optimizer->keys.size(); ++i) {
      if (!has({"learning_rate", "betas", "epsilon", "weight_decay", "timing", "clip_global_norm"}, optimizer->keys[i]))
        continue;
      ours = "optimizer." + optimizer->keys[i];
      ours_at = &optimizer->items[i];
      break;
    }
  }
  if (theirs.empty() || ours.empty()) return !theirs.empty();
  throw ConfigError(ours_at->where + ": \"" + ours + "\" is a key of Ballast, and \"" + theirs +
                    "\" one of DeepSpeed; leave the DeepSpeed file as it is, and set Ballast's keys beside it (--set " +
                    ours + (ours_at->kind == Kind::object ? ".KEY" : "") + "=VALUE)");
}

Value translate(const Value& root, DeepSpeedFile* file) { return Translator(root).run(file); }

}  // namespace ballast::deepspeed
