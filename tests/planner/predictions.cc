// From quantities to functions of the planner.
// SPDX-License-Identifier: Apache-2.0
#include "planner/predictions.h"

#include <ballast/planner/memory.h>
#include <ballast/planner/rates.h>
#include <ballast/planner/streamed_step.h>
#include <ballast/planner/traffic.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace ballast::testing {

using namespace planner;  // NOLINT: the whole vocabulary is used here

namespace {

constexpr double kGiga = 1e9, kTera = 1e12;

std::optional<double> parse_number(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || end != text.c_str() + text.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

bool holds(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }
bool ends(std::string_view text, std::string_view part) {
  return text.size() >= part.size() && text.substr(text.size() - part.size()) == part;
}

// What one of the unit is in SI.
double unit_value(const std::string& unit) {
  static const std::map<std::string, double> kUnits = {
      {"B", 1},         {"kB", 1e3},       {"MB", 1e6},           {"GB", 1e9},
      {"TB", 1e12},     {"PB", 1e15},      {"KiB", 1024},         {"MiB", 0x1p20},
      {"GiB", 0x1p30},  {"TiB", 0x1p40},   {"PiB", 0x1p50},       {"params", 1},
      {"Mparams", 1e6}, {"Bparams", 1e9},  {"Tparams", 1e12},     {"B/s", 1},
      {"MB/s", 1e6},    {"GB/s", 1e9},     {"TB/s", 1e12},        {"GiB/s", 0x1p30},
      {"FLOPS", 1},     {"GFLOPS", 1e9},   {"TFLOPS", 1e12},      {"TFLOPS/GPU", 1e12},
      {"PFLOPS", 1e15}, {"percent", 0.01}, {"fraction", 1},       {"ratio", 1},
      {"s", 1},         {"ms", 1e-3},      {"us", 1e-6},          {"min", 60},
      {"h", 3600},      {"days", 86400},   {"steps", 1},          {"iterations", 1},
      {"tokens/s", 1},  {"B/param", 1},    {"elements/param", 1}, {"model sizes", 1},
      {"elements", 1},  {"tokens", 1},     {"flop/B", 1}};
  const auto found = kUnits.find(unit);
  if (found == kUnits.end()) throw NotComputed("the unit \"" + unit + "\" is not known");
  return found->second;
}

int stage_of(const PaperCase& row) {
  const double stage = row.number("stage");
  if (stage != std::floor(stage) || stage < 0 || stage > 3) throw NotComputed("stage is none of 0 to 3");
  return static_cast<int>(stage);
}

double ranks_of(const PaperCase& row) {
  const std::string key = row.has("dp") ? "dp" : row.has("ranks") ? "ranks" : "gpus";
  const std::string& text = row.text(key);
  return text == "large" || text == "inf" || text == "infinity" ? kManyRanks : row.number(key);
}

StateBytes state_bytes_of(const PaperCase& row) {
  StateBytes bytes;
  bytes.optimizer = row.number_or("K", bytes.optimizer);
  return bytes;
}

TransformerShape shape_of(const PaperCase& row, bool heads) {
  return {row.number_or("layers", 1), row.number("hidden"), heads ? row.number("heads") : 1};
}
ActivationShape activations_of(const PaperCase& row) {
  return {row.number("batch"), row.number("seq"), row.number_or("ci", 1)};
}

// Sizes in the inputs ("gpu_mem_GB", "dram_TB") summed, in bytes.
double memory_of(const PaperCase& row) {
  double bytes = 0;
  for (const auto& [key, text] : row.inputs) {
    static const std::array<std::pair<std::string_view, double>, 6> kEnds = {
        {{"_GB", 1e9}, {"_TB", 1e12}, {"_PB", 1e15}, {"_GiB", 0x1p30}, {"_TiB", 0x1p40}, {"_MB", 1e6}}};
    for (const auto& [end, value] : kEnds) {
      if (ends(key, end)) bytes += value * row.number(key);
    }
  }
  if (bytes == 0) throw NotComputed("needs a size of memory, such as gpu_mem_GB");
  return bytes;
}

double capacity(const PaperCase& row) {
  for (const char* key : {"bytes_per_param", "gpu_bytes_per_param", "host_bytes_per_param", "nvme_bytes_per_param"}) {
    if (row.has(key)) return row.number_or("mp", 1) * largest_model(memory_of(row), row.number(key));
  }
  return largest_model_on_devices(memory_of(row), stage_of(row), ranks_of(row), row.number_or("mp", 1),
                                  state_bytes_of(row));
}

Moved moved_of(const std::string& kind) {
  if (kind.substr(0, 5) == "param") return Moved::parameters_and_gradients;
  if (kind.substr(0, 3) == "opt") return Moved::optimizer_states;
  if (kind.substr(0, 3) == "act") return Moved::activations;
  throw NotComputed("kind \"" + kind + "\" is not known");
}

IntensityCase intensity_of(const PaperCase& row) {
  IntensityCase input;
  input.moved = moved_of(row.text("kind"));
  if (input.moved == Moved::activations) {
    input.hidden = row.number("hidden");
  } else {
    input.batch = row.number("batch");
    input.sequence = row.number("seq");
  }
  input.blocks_per_checkpoint = row.number_or("ci", 1);
  return input;
}

double bandwidth_of(const PaperCase& row) {
  return row.has("bw_Bps") ? row.number("bw_Bps") : kGiga * row.number("bw_GBps");
}

DeepSpeedEstimate deepspeed_of(const PaperCase& row) {
  const auto offloads = [&](const char* key) { return row.has(key) && row.text(key) != "none"; };
  DeepSpeedCase input;
  input.parameters = row.number("params");
  input.largest_layer = row.number_or("largest_layer", 0);
  input.gpus_per_node = row.number("gpus");
  input.nodes = row.number_or("nodes", 1);
  input.stage = stage_of(row);
  input.offload_optimizer = offloads("offload_opt");
  input.offload_parameters = offloads("offload_param");
  input.buffer_factor = row.number_or("buffer", 1.5);
  return deepspeed_estimate(input);
}

// "fp16 params+fp32 master": bytes of each named tensor, summed; what is not said is of `otherwise` bytes.
double tensor_bytes(const std::string& text, double otherwise) {
  double bytes = 0;
  std::size_t begin = 0;
  const auto add = [&](std::string_view part) {
    if (part.find_first_not_of(' ') == part.npos) return;
    if (holds(part, "fp32")) {
      otherwise = 4;
    } else if (holds(part, "16")) {
      otherwise = 2;
    }
    bytes += otherwise;
  };
  for (std::size_t at = 0; at <= text.size(); ++at) {
    const bool then = text.compare(at, 6, " then ") == 0;
    if (at < text.size() && text[at] != '+' && !then) continue;
    add(std::string_view(text).substr(begin, at - begin));
    begin = at + (then ? 6 : 1);
  }
  if (bytes == 0) throw NotComputed("names no tensors");
  return bytes;
}

// "2M" with M=2*params: the numbers before each.
double volume_of(const PaperCase& row) {
  double product = 1;
  for (const char* key : {"M", "volume"}) {
    char* end = nullptr;
    const std::string& text = row.text(key);
    const double value = std::strtod(text.c_str(), &end);
    product *= end == text.c_str() ? 1 : value;
  }
  return product;
}

double product_of(const PaperCase& row) {
  double product = 1;
  if (row.inputs.empty()) throw NotComputed("needs factors");
  for (const auto& [key, text] : row.inputs) product *= row.number(key);
  return product;
}

// Of two times the slower over the faster system, of two speeds the other way round; the system compared with is named.
double compared(const PaperCase& row) {
  static const std::array<std::pair<const char*, const char*>, 6> kPairs = {{{"zero_offload_s", "zero_inf_s"},
                                                                             {"ds_s", "mlp_s"},
                                                                             {"ds_s", "ao_s"},
                                                                             {"llmq_tps", "ds_tps"},
                                                                             {"zeropp", "zero3"},
                                                                             {"base_s", "new_s"}}};
  for (const auto& [above, below] : kPairs) {
    if (row.has(above) && row.has(below)) return seconds_of(row.number(above), row.number(below));
  }
  throw NotComputed("needs the two figures that are compared");
}

// The published runs' steps: flop per step over the simulator's time.
Prediction flops_of_streamed_step(const PaperCase& row) {
  const bool node = row.has("nvme_node_GBps");
  const double parameters = row.number("params");
  const double gpus = row.number_or("gpus", 1);
  const double batch = row.has("batch_per_gpu") ? row.number("batch_per_gpu") : row.number("batch");
  const double per_token = row.number_or("flops_per_param_token", kFlopsWithRecompute);
  const double flops = step_flops(parameters, batch * row.number("seq"), per_token);  // of each GPU
  StreamedStep step;
  step.parameters = parameters;
  step.compute_seconds = seconds_of(flops, kTera * row.number("peak_tflops"));
  if (node) {
    step.nvme_read_per_parameter = step.nvme_written_per_parameter = row.number("nvme_bytes_per_param") / 2;
    step.read_bytes_per_second = step.write_bytes_per_second = kGiga * row.number("nvme_node_GBps");
  } else {
    const double drives = row.number_or("ssds", 1);
    step.nvme_read_per_parameter = row.number("nvme_read_B");
    step.nvme_written_per_parameter = row.number("nvme_write_B");
    step.read_bytes_per_second = drives * kGiga * row.number("read_GBps");
    step.write_bytes_per_second = drives * kGiga * row.number("write_GBps");
  }
  step.duplex = row.number_or("duplex", 1);
  step.overlapped = !row.has("overlap") || row.text("overlap").substr(0, 4) != "none";
  if (gpus < 1) throw NotComputed("gpus is below 1");
  return {seconds_of(flops, simulate_streamed_step(step).step_seconds), "simulator"};
}

// The update phase of a step: states read and written, nothing computed meanwhile.
Prediction update_phase(const PaperCase& row) {
  StreamedStep step;
  step.parameters = row.number("params");
  step.nvme_read_per_parameter = step.nvme_written_per_parameter = row.number("bytes_per_param") / 2;
  step.read_bytes_per_second = step.write_bytes_per_second = kGiga * row.number("effective_GBps");
  step.overlapped = false;
  return {simulate_streamed_step(step).step_seconds, "simulator"};
}

double rate_times_bytes(const PaperCase& row, const char* bytes_key, const char* rate_key) {
  return seconds_of(row.number("params") * row.number(bytes_key), kGiga * row.number(rate_key));
}

struct Rule {
  std::vector<std::string_view> words;  // all of them are part of the quantity
  std::function<Prediction(const PaperCase&)> answer;
};

Rule formula(std::vector<std::string_view> words, std::function<double(const PaperCase&)> answer) {
  return {std::move(words), [answer = std::move(answer)](const PaperCase& row) {
            return Prediction{answer(row), "formula"};
          }};
}

using Row = const PaperCase&;

std::vector<Rule> memory_rules() {
  return {
      formula({"model-state bytes per device"},
              [](Row r) { return model_state_bytes(r.number("params"), stage_of(r), ranks_of(r), state_bytes_of(r)); }),
      formula({"largest model"}, capacity),
      formula({"GPU model-state bytes left"}, [](Row r) { return tensor_bytes(r.text("kept"), 2); }),
      formula({"model states; Adam"},
              [](Row r) { return model_state_bytes(r.number("params"), 0, 1, state_bytes_of(r)); }),
      formula({"host bytes for"}, [](Row r) { return r.number("params") * r.number("host_bytes_per_param"); }),
      formula({"parameter count"}, [](Row r) { return transformer_parameters(shape_of(r, false)); }),
      formula({"parameters of the"}, [](Row r) { return transformer_parameters(shape_of(r, false)); }),
      formula({"model states 240"}, [](Row r) { return transformer_state_bytes(shape_of(r, false)); }),
      formula({"activation checkpoints"},
              [](Row r) { return checkpoint_bytes(shape_of(r, false), activations_of(r)); }),
      formula({"all activations"}, [](Row r) { return activation_bytes(shape_of(r, true), activations_of(r)); }),
      formula({"activation working memory"},
              [](Row r) { return 2 * activation_working_elements(shape_of(r, true), activations_of(r)); }),
      formula({"model-state working memory"},
              [](Row r) { return model_state_working_bytes(shape_of(r, false), r.number_or("tiles", 1)); }),
      formula({"GiB of host"}, [](Row r) { return deepspeed_of(r).host_bytes; }),
      formula({"GiB per GPU"}, [](Row r) { return deepspeed_of(r).device_bytes; }),
      formula({"partition per rank"}, [](Row r) { return r.number("params") * r.number("bytes") / ranks_of(r); }),
      formula({"moment memory"}, [](Row r) { return r.number("params") * r.number("bytes"); }),
      formula({"memory saved"}, [](Row r) { return r.number("params") * (r.number("from_B") - r.number("to_B")); }),
  };
}

std::vector<Rule> traffic_rules() {
  const auto collectives = [](Row r) {
    CollectiveCase input;
    input.stage = stage_of(r);
    input.ranks = ranks_of(r);
    input.micro_batches = r.number_or("grad_accum", 1);
    input.vertical = r.has("order") && r.text("order") == "vertical";
    return collective_elements(input);
  };
  return {
      formula({"collective volume"}, collectives),
      formula({"bytes sent per rank per parameter"},
              [collectives](Row r) { return collectives(r) * r.number_or("elem_bytes", 2); }),
      formula({"cross-node bytes"}, [](Row r) { return r.number("volume_M") * r.number("elem_bytes"); }),
      formula({"least CPU-GPU traffic"}, [](Row r) { return r.number("grads_d2h") + r.number("params_h2d"); }),
      formula({"NVMe read bytes per parameter"}, [](Row r) { return nvme_bytes(nvme_layout(r.text("layout"))).read; }),
      formula({"NVMe write bytes per parameter"},
              [](Row r) { return nvme_bytes(nvme_layout(r.text("layout"))).written; }),
      formula({"NVMe bytes read per parameter"}, [](Row r) { return tensor_bytes(r.text("tensors"), 4); }),
      formula({"NVMe bytes written per parameter"}, [](Row r) { return tensor_bytes(r.text("tensors"), 4); }),
      formula({"SmartUpdate"}, volume_of),
      formula({"NVMe bytes left with a DRAM cache"}, [](Row r) { return uncached_share(r.number("cache_fraction")); }),
      formula({"DRAM bytes per parameter of one CPU Adam"},
              [](Row r) { return adam_bytes(adam_layout(r.text("layout"))); }),
      formula({"bytes written per iteration"}, [](Row r) { return r.number("params") * r.number("bytes_per_param"); }),
      formula({"speed-up", "storage-bound"}, [](Row r) { return storage_bound_speed_up(r.number("bytes_ratio")); }),
      formula({"largest speed-up"}, [](Row r) { return largest_speed_up(r.number("bytes_ratio")); }),
  };
}

std::vector<Rule> time_rules() {
  return {
      formula({"efficiency"},
              [](Row r) {
                return efficiency(arithmetic_intensity(intensity_of(r)), bandwidth_of(r),
                                  kTera * r.number("peak_tflops"));
              }),
      formula({"slow-memory bandwidth per device"},
              [](Row r) {
                return slow_memory_bandwidth_per_device(1e15 * r.number("peak_pf_per_device"), r.number("devices"));
              }),
      formula({"GPU-to-GPU bandwidth per device"},
              [](Row r) { return device_to_device_bandwidth(1e15 * r.number("peak_pf_per_device")); }),
      formula({"aggregate slow-memory bandwidth"},
              [](Row r) { return aggregate_rate(kGiga * r.number("per_device_GBps"), r.number("devices")); }),
      formula({"aggregate CPU-GPU bandwidth"},
              [](Row r) { return aggregate_rate(kGiga * r.number("node_GBps"), r.number("nodes")); }),
      formula({"Adam latency"},
              [](Row r) {
                return cpu_adam_seconds(r.number("params"), r.number("bytes_per_param"),
                                        kGiga * r.number("effective_dram_GBps"));
              }),
      formula({"Adam step on"},
              [](Row r) {
                return cpu_adam_seconds(r.number("params"), r.number("bytes_per_param"),
                                        kGiga * r.number("effective_dram_GBps"));
              }),
      {{"TFLOPS", "one DGX-2"}, flops_of_streamed_step},
      {{"TFLOPS", "SSD"}, flops_of_streamed_step},
      {{"update phase"}, update_phase},
      formula({"backward phase"}, [](Row r) { return rate_times_bytes(r, "bytes_per_param", "effective_GBps"); }),
      formula({"iteration time"},
              [](Row r) {
                const double flops = step_flops(r.number("params"), r.number("batch_per_gpu") * r.number("seq"));
                return seconds_of(flops, kTera * r.number("tflops_per_gpu"));
              }),
      formula({"step time"}, [](Row r) { return seconds_of(r.number("tokens_per_step"), r.number("tokens_per_s")); }),
      formula({"share of", "peak"},
              [](Row r) {
                return share_of_peak(r.number("params_in_matmul"), r.number("tokens_per_s"),
                                     r.number_or("flops_per_param_token", kFlopsPerParameterToken),
                                     kTera * r.number("peak_tflops"));
              }),
      formula({"generation tokens/s"},
              [](Row r) {
                return streamed_tokens_per_second(r.number("params"), r.number("batch"), kGiga * r.number("nvme_GBps"));
              }),
      formula({"checkpoint"}, [](Row r) { return seconds_of(r.number("bytes_GB"), r.number("rate_GBps")); }),
      formula({"NVMe read time"}, [](Row r) { return rate_times_bytes(r, "read_B_per_param", "read_GBps"); }),
      formula({"NVMe write time"}, [](Row r) { return rate_times_bytes(r, "write_B_per_param", "write_GBps"); }),
      formula({"product of"}, product_of),
      formula({"rollback rate"}, [](Row r) { return seconds_of(r.number("rollbacks"), r.number("steps")); }),
      formula({"ratio"}, compared),
      formula({"speed-up"}, compared),
  };
}

std::vector<Rule> machine_rules() {
  return {
      formula({"until rated endurance"},
              [](Row r) {
                return endurance_steps(kTera * r.number("tbw_TB"), r.number("write_B_per_param") * r.number("params"));
              }),
      formula({"in the life of"},
              [](Row r) {
                const double life = flash_life_bytes(r.number("pe_cycles"), r.number_or("retention_gain", 1),
                                                     kTera * r.number("capacity_TB"));
                return endurance_steps(life, kGiga * r.number("written_GB"));
              }),
      formula({"one-way rate"},
              [](Row r) { return pcie_rate(1e9 * r.number("GTps"), r.number("lanes"), r.number("code")); }),
      formula({"measured host to device"},
              [](Row r) { return pcie_measured_rate(static_cast<int>(r.number("gen")), r.number("lanes")); }),
      formula({"rate per GPU"}, [](Row r) { return rate_per_device(kGiga * r.number("node_GBps"), r.number("gpus")); }),
      formula({"DDR"}, [](Row r) { return memory_rate(1e6 * r.number("MTps"), r.number("channels")); }),
      formula({"node network"}, [](Row r) { return network_rate(1e9 * r.number("Gbps"), r.number("ports")); }),
  };
}

const std::vector<Rule>& rules() {
  static const std::vector<Rule> kRules = [] {
    std::vector<Rule> all;
    // Traffic before memory: "largest speed-up" is no "largest model"; both before what any ratio answers.
    for (auto part : {traffic_rules(), memory_rules(), machine_rules(), time_rules()})
      all.insert(all.end(), part.begin(), part.end());
    return all;
  }();
  return kRules;
}

}  // namespace

const std::string& PaperCase::text(const std::string& key) const {
  const auto found = inputs.find(key);
  if (found == inputs.end()) throw NotComputed("needs the input " + key);
  return found->second;
}

double PaperCase::number(const std::string& key) const {
  const std::optional<double> value = parse_number(text(key));
  if (!value) throw NotComputed("the input " + key + " is no number");
  return *value;
}

double PaperCase::number_or(const std::string& key, double otherwise) const {
  return has(key) ? number(key) : otherwise;
}

Prediction predict(const PaperCase& row) {
  std::string reason = "no function of the planner answers this quantity";
  for (const Rule& rule : rules()) {
    if (!std::all_of(rule.words.begin(), rule.words.end(), [&](auto word) { return holds(row.quantity, word); }))
      continue;
    try {
      Prediction prediction = rule.answer(row);
      prediction.value /= unit_value(row.unit);
      if (!std::isfinite(prediction.value)) throw NotComputed("the inputs lead to no finite number");
      return prediction;
    } catch (const NotComputed& missing) {
      reason = missing.what();
    }
  }
  throw NotComputed(reason);
}

}  // namespace ballast::testing
