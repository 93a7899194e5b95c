// ballast plan: what a run of train will take, before anything is started: memory by tier, bytes and time of a step,
// what limits it, what would help, and what it does to the drives. SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/base/size.h>
#include <ballast/planner/run_plan.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "command.h"
#include "display.h"
#include "gpt/settings.h"
#include "output_file.h"
#include "run_record.h"

namespace ballast::cli {
namespace {

using Json = nlohmann::ordered_json;
using planner::RunPlan;

struct Options {
  EngineOptions engine;
  std::string model, hardware, json;
  std::int64_t ranks = 1;
  std::optional<std::int64_t> batch;
  std::int64_t sequence = 128;
  std::optional<std::int64_t> micro_batches;
  std::string order = "horizontal";
};

gpt::TrainSettings settings_of(const Options& options, const Config& config, const gpt::GptShape& shape) {
  gpt::TrainSettings settings;
  settings.world_size = static_cast<int>(options.ranks);
  const BatchSizes sizes = batch_sizes(config, options.batch, options.micro_batches, settings.world_size);
  settings.batch = sizes.sequences;
  settings.micro_batches = sizes.micro_batches;
  settings.sequence = options.sequence;
  settings.order = options.order == "vertical" ? gpt::MicroBatchOrder::vertical : gpt::MicroBatchOrder::horizontal;
  settings.validate(shape);
  return settings;
}

// The reference GPT as its trainer goes over it. Dense products take 2 flop per weight and token forward and twice that
// backward, and so do attention's two products of a sequence's length; the head does all of its work with its gradient.
planner::RunModel run_model(const gpt::GptShape& shape, const gpt::TrainSettings& settings) {
  planner::RunModel model;
  std::vector<UnitId> ids;
  for (gpt::GptUnit& unit : gpt::gpt_units(shape)) {
    ids.push_back({static_cast<std::uint32_t>(ids.size())});
    model.units.push_back({std::move(unit.name), std::move(unit.parameters)});
  }
  model.vertical = settings.order == gpt::MicroBatchOrder::vertical;
  model.micro_batches = static_cast<int>(settings.micro_batches);
  model.order = gpt::gpt_access_order(shape, ids, model.vertical ? model.micro_batches : 1);
  model.tokens = static_cast<double>(settings.batch * settings.sequence);
  const double tokens = model.tokens / static_cast<double>(settings.micro_batches) / settings.world_size;
  const auto width = static_cast<double>(shape.width);
  const double block = tokens * (24 * width * width + 4 * static_cast<double>(settings.sequence) * width);
  const double head = tokens * 2 * width * static_cast<double>(shape.vocabulary);
  const auto last = static_cast<std::uint32_t>(ids.size() - 1);
  const auto slots = static_cast<std::size_t>(model.vertical ? model.micro_batches : 1);
  for (const ExpectedAccess& access : model.order) {
    const std::uint32_t unit = access.unit.index;
    double flops = 0;
    if (unit == last) {
      flops = access.gradient ? 3 * head : 0;
    } else if (unit > 0) {
      // Opened for the gradients that follow: they do the work.
      flops = access.gradient            ? 2 * block
              : access.open_through == 0 ? block * (model.vertical ? static_cast<double>(settings.micro_batches) : 1)
                                         : 0;
    }
    model.access_flops.push_back(flops);
    // The head has a gradient for the tokens' embedding, and none for that of positions.
    const bool of_head = unit == 0 && access.gradient && model.access_flops.size() < model.order.size() - slots + 1;
    model.access_absent.push_back({});
    if (of_head) model.access_absent.back().push_back(gpt::embedding::wpe);
  }
  return model;
}

// What the machine lacks, in words; the budgets say nothing about it.
std::vector<std::string> shortages(const RunPlan& plan, const planner::HardwareProfile& hardware) {
  std::vector<std::string> texts;
  const auto check = [&](double needed, double there, const std::string& what) {
    if (there > 0 && needed > there) {
      texts.push_back(what + " needs " + base::format_size(static_cast<std::uint64_t>(needed)) + " and " +
                      hardware.name + " has " + base::format_size(static_cast<std::uint64_t>(there)));
    }
  };
  check(static_cast<double>(plan.peak_device_bytes), hardware.device_memory, "each device");
  check(static_cast<double>(plan.peak_host_bytes) * plan.ranks_on_node, hardware.host_memory, "a node's host memory");
  check(static_cast<double>(plan.nvme_stored_bytes) * plan.ranks_on_node, hardware.nvme_capacity, "a node's NVMe");
  return texts;
}

std::string lane_words(std::string_view lane) {
  if (lane == "nvme") return "NVMe";
  if (lane == "host_to_device") return "copies to the device";
  if (lane == "device_to_host") return "copies from the device";
  if (lane == "copies") return "copies both ways";
  if (lane == "collective") return "collectives";
  if (lane == "cpu") return "host memory (updates)";
  return "compute";
}

// "NVMe, 71 % of the step; twice the NVMe drives would give 1.42 x the tokens per second"
std::string limit_text(const RunPlan& plan, const std::vector<planner::Change>& changes) {
  std::string text = lane_words(plan.bound.limiting()) + ", " +
                     fixed_text(100 * plan.bound.largest() / plan.step_seconds, 0) + " % of the step";
  if (!changes.empty() && changes.front().gain > 1.02) {
    text +=
        "; " + changes.front().what + " would give " + fixed_text(changes.front().gain, 2) + " x the tokens per second";
  }
  return text;
}

std::string size_text(std::uint64_t bytes) { return base::format_size(bytes); }

std::string tiers_text(const planner::TierSizes& sizes) {
  std::string text;
  const auto add = [&](std::uint64_t bytes, const char* tier) {
    if (bytes > 0) text += (text.empty() ? "" : ", ") + size_text(bytes) + " " + tier;
  };
  add(sizes.device, "device");
  add(sizes.host, "host");
  add(sizes.nvme, "NVMe");
  return text.empty() ? "consumed at once" : text;
}

std::string seconds_text(double seconds) {
  return seconds < 1 ? fixed_text(seconds * 1e3, 1) + " ms" : fixed_text(seconds, 2) + " s";
}

void print_plan(const Options& options, const RunPlan& plan, const planner::HardwareProfile& hardware,
                const std::vector<planner::Change>& changes, const std::vector<planner::CurvePoint>& curve) {
  std::printf("%s: %s parameters on %lld rank%s (%.0f a node), ZeRO stage %d, placement %s, timing %s\n",
              options.model.c_str(), count_text(static_cast<double>(plan.parameters)).c_str(),
              static_cast<long long>(options.ranks), options.ranks == 1 ? "" : "s", plan.ranks_on_node, plan.zero_stage,
              plan.placement.c_str(), plan.timing.c_str());
  std::printf("%s%s\n", hardware.name.c_str(), options.hardware.empty() ? " (assumed: give --hardware)" : "");
  const double mine = static_cast<double>(plan.parameters) / static_cast<double>(options.ranks);
  const auto per_parameter = [&](std::uint64_t bytes) { return fixed_text(static_cast<double>(bytes) / mine, 2); };
  const auto budget = [](std::uint64_t peak, std::uint64_t of, std::uint64_t smallest) {
    return size_text(peak) + " of " + size_text(of) + "; smallest " +
           (smallest == 0 ? "n/a (the other budget is too small)" : size_text(smallest));
  };
  std::vector<std::pair<std::string, std::string>> rows = {
      {"parameters, a rank", tiers_text(plan.parameter_bytes)},
      {"optimizer states, a rank", tiers_text(plan.optimizer_bytes)},
      {"gradients, a rank", tiers_text(plan.gradient_bytes)}};
  for (const MemoryRange& range : plan.device_memory) rows.push_back({"device: " + range.name, size_text(range.bytes)});
  for (const MemoryRange& range : plan.host_memory) rows.push_back({"host: " + range.name, size_text(range.bytes)});
  rows.push_back(
      {"device memory, a rank", budget(plan.peak_device_bytes, plan.budget_device_bytes, plan.smallest_device_bytes)});
  rows.push_back(
      {"host memory, a rank", budget(plan.peak_host_bytes, plan.budget_host_bytes, plan.smallest_host_bytes)});
  rows.push_back({"host memory, a node", size_text(static_cast<std::uint64_t>(
                                             static_cast<double>(plan.peak_host_bytes) * plan.ranks_on_node))});
  const auto& bytes = plan.bytes_per_step;
  rows.push_back({"NVMe bytes per parameter and step",
                  per_parameter(bytes.nvme_read) + " read + " + per_parameter(bytes.nvme_written) + " written"});
  rows.push_back(
      {"to and from the device, a step", size_text(bytes.host_to_device) + " and " + size_text(bytes.device_to_host)});
  if (bytes.collective > 0) rows.push_back({"collectives, a step", size_text(bytes.collective)});
  rows.push_back({"step", seconds_text(plan.step_seconds) + "; bound " + seconds_text(plan.bound.largest()) +
                              " (NVMe " + seconds_text(plan.bound.nvme) + ", compute " +
                              seconds_text(plan.bound.compute) + ", copies " + seconds_text(plan.bound.copies) +
                              ", host memory " + seconds_text(plan.bound.cpu) + ", collectives " +
                              seconds_text(plan.bound.collective) + ")"});
  rows.push_back({"tokens/s, of all ranks",
                  count_text(plan.tokens_per_second) + "; " + fixed_text(100 * plan.share_of_peak, 1) + " % of peak"});
  if (plan.nvme_written_per_day > 0) {
    rows.push_back(
        {"written to a node's NVMe per day",
         size_text(static_cast<std::uint64_t>(plan.nvme_written_per_day)) +
             (plan.endurance_days > 0 ? "; rated endurance in " + fixed_text(plan.endurance_days, 0) + " days"
                                      : "; their rated endurance is not known")});
  }
  rows.push_back({"limited by", limit_text(plan, changes)});
  print_table(rows);
  if (!changes.empty()) {
    std::printf("\none thing changed                tokens/s\n");
    for (const planner::Change& change : changes) std::printf("%-32s %6.2f x\n", change.what.c_str(), change.gain);
  }
  std::printf("\n%14s %12s %12s  limited by\n", "tokens a step", "step", "tokens/s");
  for (const planner::CurvePoint& point : curve) {
    std::printf("%14.0f %12s %12s  %s\n", point.tokens, seconds_text(point.step_seconds).c_str(),
                count_text(point.tokens_per_second).c_str(), lane_words(point.limited_by).c_str());
  }
  for (const std::string& shortage : shortages(plan, hardware)) std::printf("warning: %s\n", shortage.c_str());
}

Json to_json(const Options& options, const gpt::TrainSettings& settings, const Config& config, const RunPlan& plan,
             const planner::HardwareProfile& hardware, const std::vector<planner::Change>& changes,
             const std::vector<planner::CurvePoint>& curve) {
  Json out;
  out["parameters"] = plan.parameters;
  out["world_size"] = options.ranks;
  out["zero_stage"] = plan.zero_stage;
  out["placement"] = plan.placement;
  out["timing"] = plan.timing;
  out["step_seconds"] = finite_or_null(plan.step_seconds);
  out["tokens_per_second"] = finite_or_null(plan.tokens_per_second);
  out["share_of_peak"] = finite_or_null(plan.share_of_peak);
  out["efficiency"] = finite_or_null(plan.bound.largest() / plan.step_seconds);
  const planner::StepBound& bound = plan.bound;
  out["bound_seconds"] = {{"nvme", bound.nvme},
                          {"host_to_device", bound.host_to_device},
                          {"device_to_host", bound.device_to_host},
                          {"collective", bound.collective},
                          {"compute", bound.compute},
                          {"cpu", bound.cpu}};
  const auto& bytes = plan.bytes_per_step;
  out["bytes_per_step"] = {{"nvme_read", bytes.nvme_read},
                           {"nvme_written", bytes.nvme_written},
                           {"host_to_device", bytes.host_to_device},
                           {"device_to_host", bytes.device_to_host},
                           {"collective", bytes.collective}};
  out["flops_per_step"] = plan.flops_per_step;
  out["peak_bytes"] = {{"device", plan.peak_device_bytes}, {"host", plan.peak_host_bytes}};
  out["budget_bytes"] = {{"device", plan.budget_device_bytes}, {"host", plan.budget_host_bytes}};
  const auto smallest = [](std::uint64_t value) { return value == 0 ? Json(nullptr) : Json(value); };
  out["smallest_budget_bytes"] = {{"device", smallest(plan.smallest_device_bytes)},
                                  {"host", smallest(plan.smallest_host_bytes)}};
  const auto tiers = [](const planner::TierSizes& sizes) {
    return Json{{"device", sizes.device}, {"host", sizes.host}, {"nvme", sizes.nvme}};
  };
  out["state_bytes"] = {{"parameters", tiers(plan.parameter_bytes)},
                        {"optimizer", tiers(plan.optimizer_bytes)},
                        {"gradients", tiers(plan.gradient_bytes)}};
  const auto ranges = [](const std::vector<MemoryRange>& of) {
    Json result = Json::object();
    for (const MemoryRange& range : of) result[range.name] = range.bytes;
    return result;
  };
  out["device_memory"] = ranges(plan.device_memory);
  out["host_memory"] = ranges(plan.host_memory);
  out["nvme_stored_bytes"] = plan.nvme_stored_bytes;
  out["resident_fraction"] = plan.resident_fraction;
  out["node"] = {{"ranks", plan.ranks_on_node},
                 {"host_bytes", static_cast<double>(plan.peak_host_bytes) * plan.ranks_on_node},
                 {"nvme_stored_bytes", static_cast<double>(plan.nvme_stored_bytes) * plan.ranks_on_node},
                 {"nvme_written_bytes_per_day", plan.nvme_written_per_day},
                 {"endurance_days", plan.endurance_days > 0 ? Json(plan.endurance_days) : Json(nullptr)}};
  out["limited_by"] = plan.bound.limiting();
  out["changes"] = Json::array();
  for (const planner::Change& change : changes)
    out["changes"].push_back({{"what", change.what}, {"gain", change.gain}, {"step_seconds", change.step_seconds}});
  out["curve"] = Json::array();
  for (const planner::CurvePoint& point : curve) {
    out["curve"].push_back({{"tokens_per_step", point.tokens},
                            {"step_seconds", point.step_seconds},
                            {"tokens_per_second", point.tokens_per_second},
                            {"limited_by", point.limited_by}});
  }
  out["warnings"] = shortages(plan, hardware);
  out["hardware"] = hardware.name;
  out["model"] = options.model;
  out["batch"] = settings.batch;
  out["sequence"] = settings.sequence;
  out["micro_batches"] = settings.micro_batches;
  out["order"] = options.order;
  out["configuration"] = Json::parse(config.to_json());
  return out;
}

int run(const Options& options) {
  require_distinct({{"--json", options.json}},
                   {{"--model", options.model}, {"--engine", options.engine.path()}, {"--hardware", options.hardware}});
  const gpt::GptShape shape = gpt::GptShape::from_file(options.model);
  const Config config = options.engine.load();
  const planner::HardwareProfile hardware =
      options.hardware.empty() ? planner::two_core_profile() : planner::HardwareProfile::from_file(options.hardware);
  const gpt::TrainSettings settings = settings_of(options, config, shape);
  OutputFile json(options.json);
  const planner::RunModel model = run_model(shape, settings);
  const planner::RunOptions run_options{.world_size = settings.world_size};
  const RunPlan plan = planner::plan_run(model, config, hardware, run_options);
  const std::vector<planner::Change> changes = planner::try_changes(model, config, hardware, run_options, plan);
  const std::vector<planner::CurvePoint> curve =
      planner::tokens_curve(model, config, hardware, run_options, {0.25, 1, 4, 16, 64});
  print_plan(options, plan, hardware, changes, curve);
  if (json.wanted()) json.publish(to_json(options, settings, config, plan, hardware, changes, curve).dump(2) + "\n");
  return 0;
}

}  // namespace

Command add_plan(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* parser = app.add_subcommand("plan", "Tell what a training run will take, without starting it");
  parser->add_option("--model", options->model, "Shape of the GPT, JSON")->type_name("FILE")->required();
  options->engine.add_to(*parser, true);
  options->engine.add_explain(*parser);
  parser->add_option("--hardware", options->hardware, "Hardware profile, JSON (one of a two-core machine)")
      ->type_name("FILE");
  const auto positive = CLI::PositiveNumber;
  parser->add_option("--ranks", options->ranks, "Ranks, each with a device")
      ->type_name("N")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  parser->add_option("--batch", options->batch, "Sequences per step, over all ranks and micro-batches (4 x those)")
      ->type_name("B")
      ->check(positive);
  parser->add_option("--sequence", options->sequence, "Tokens per sequence")
      ->type_name("T")
      ->check(positive)
      ->capture_default_str();
  parser->add_option("--micro-batches", options->micro_batches, "Passes per step (1)")->type_name("K")->check(positive);
  parser->add_option("--order", options->order, "Micro-batches one after another, or layer by layer")
      ->check(CLI::IsMember({"horizontal", "vertical"}))
      ->capture_default_str();
  parser->add_option("--json", options->json, "Write all figures to FILE")->type_name("FILE");
  return {parser, [options] { return run(*options); }};
}

}  // namespace ballast::cli
