// Time in closed form.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/planner/rates.h>

#include <algorithm>
#include <array>
#include <utility>

#include "require.h"

namespace ballast::planner {

double arithmetic_intensity(const IntensityCase& input) {
  require_positive(input.blocks_per_checkpoint, "blocks per checkpoint");
  if (input.moved == Moved::activations) {
    require_positive(input.hidden, "the hidden size");
    return 24 * input.hidden * input.blocks_per_checkpoint;
  }
  require_positive(input.batch, "the batch");
  require_positive(input.sequence, "the sequence");
  const double tokens = input.batch * input.sequence;
  // 8 flop per parameter and token; 8 bytes of parameters and gradients moved, 32 of optimizer states.
  return input.moved == Moved::parameters_and_gradients ? tokens : tokens / 4;
}

double efficiency(double intensity, double bytes_per_second, double peak_flops) {
  require_positive(intensity, "arithmetic intensity");
  require_positive(bytes_per_second, "bandwidth");
  require_positive(peak_flops, "peak");
  return intensity * bytes_per_second / (intensity * bytes_per_second + peak_flops);
}

double overlapped_efficiency(double intensity, double bytes_per_second, double peak_flops) {
  require_positive(intensity, "arithmetic intensity");
  require_positive(bytes_per_second, "bandwidth");
  require_positive(peak_flops, "peak");
  return std::min(1.0, intensity * bytes_per_second / peak_flops);
}

double required_bandwidth(double wanted_efficiency, double intensity, double peak_flops) {
  if (!(wanted_efficiency > 0 && wanted_efficiency < 1)) throw ConfigError("an efficiency must be between 0 and 1");
  require_positive(intensity, "arithmetic intensity");
  require_positive(peak_flops, "peak");
  return wanted_efficiency / (1 - wanted_efficiency) * peak_flops / intensity;
}

double slow_memory_bandwidth_per_device(double peak_flops_per_device, double devices) {
  require_positive(peak_flops_per_device, "peak");
  require_positive(devices, "the number of devices");
  constexpr double kReferencePeak = 70e12, kReferenceAggregate = 512 * 3e9;
  return kReferenceAggregate * (peak_flops_per_device / kReferencePeak) / devices;
}

double device_to_device_bandwidth(double peak_flops_per_device) {
  require_positive(peak_flops_per_device, "peak");
  return peak_flops_per_device / 1000;
}

double step_flops(double parameters, double tokens, double flops_per_parameter_token) {
  require_positive(parameters, "the number of parameters");
  require_positive(tokens, "the number of tokens");
  require_positive(flops_per_parameter_token, "flop per parameter and token");
  return parameters * tokens * flops_per_parameter_token;
}

double seconds_of(double work, double per_second) {
  require_not_negative(work, "work");
  if (work == 0) return 0;
  require_positive(per_second, "a rate");
  return work / per_second;
}

double share_of_peak(double parameters, double tokens_per_second, double flops_per_parameter_token, double peak_flops) {
  require_positive(peak_flops, "peak");
  return step_flops(parameters, tokens_per_second, flops_per_parameter_token) / peak_flops;
}

double streamed_tokens_per_second(double parameters, double batch, double bytes_per_second) {
  require_positive(parameters, "the number of parameters");
  require_positive(batch, "the batch");
  require_positive(bytes_per_second, "bandwidth");
  return batch * bytes_per_second / (2 * parameters);
}

double nvme_seconds(double read_bytes, double written_bytes, double read_rate, double write_rate, double duplex) {
  if (!(duplex >= 1 && duplex <= 2)) throw ConfigError("a duplex factor must be from 1 (in turn) to 2 (independent)");
  const double read = seconds_of(read_bytes, read_rate);
  const double written = seconds_of(written_bytes, write_rate);
  return std::max({(read + written) / duplex, read, written});
}

double StepBound::largest() const {
  return std::max({compute, nvme, host_to_device, device_to_host, copies, cpu, collective});
}

std::string_view StepBound::limiting() const {
  const std::array<std::pair<double, std::string_view>, 7> lanes = {{{nvme, "nvme"},
                                                                     {compute, "compute"},
                                                                     {host_to_device, "host_to_device"},
                                                                     {device_to_host, "device_to_host"},
                                                                     {copies, "copies"},
                                                                     {collective, "collective"},
                                                                     {cpu, "cpu"}}};
  return std::max_element(lanes.begin(), lanes.end(), [](const auto& a, const auto& b) { return a.first < b.first; })
      ->second;
}

StepBound step_bound(const StepWork& work, const StepRates& rates) {
  StepBound bound;
  bound.compute = seconds_of(work.flops, rates.flops);
  bound.nvme = nvme_seconds(work.nvme_read, work.nvme_written, rates.nvme_read, rates.nvme_write, rates.nvme_duplex);
  bound.host_to_device = seconds_of(work.host_to_device, rates.host_to_device);
  bound.device_to_host = seconds_of(work.device_to_host, rates.device_to_host);
  bound.copies = nvme_seconds(work.host_to_device, work.device_to_host, rates.host_to_device, rates.device_to_host,
                              rates.copies_duplex);
  bound.cpu = seconds_of(work.memory, rates.memory);
  bound.collective = seconds_of(work.network, rates.network);
  return bound;
}

double cpu_adam_seconds(double parameters, double bytes_per_parameter, double memory_bytes_per_second) {
  require_positive(bytes_per_parameter, "bytes per parameter");
  return seconds_of(parameters * bytes_per_parameter, memory_bytes_per_second);
}

double pcie_rate(double transfers_per_second, double lanes, double code) {
  require_positive(transfers_per_second, "transfers per second");
  require_positive(lanes, "the number of lanes");
  if (!(code > 0 && code <= 1)) throw ConfigError("a line code's share must be above 0 and at most 1");
  return transfers_per_second * lanes * code / 8;
}

double pcie_measured_rate(int generation, double lanes) {
  struct Generation {
    double transfers, share;  // share: of the line rate, as copies from pinned memory have been measured
  };
  constexpr std::array<Generation, 3> kGenerations = {{{8e9, 0.76}, {16e9, 0.83}, {32e9, 0.88}}};  // 3, 4, 5
  if (generation < 3 || generation > 5)
    throw ConfigError("copies over PCIe generation " + std::to_string(generation) + " have not been measured");
  const Generation& of = kGenerations[static_cast<std::size_t>(generation - 3)];
  return pcie_rate(of.transfers, lanes, 128.0 / 130) * of.share;
}

double memory_rate(double transfers_per_second, double channels) {
  require_positive(transfers_per_second, "transfers per second");
  require_positive(channels, "the number of channels");
  return transfers_per_second * 8 * channels;
}

double network_rate(double bits_per_second, double ports) {
  require_positive(bits_per_second, "bits per second");
  require_positive(ports, "the number of ports");
  return bits_per_second / 8 * ports;
}

double rate_per_device(double node_rate, double devices) {
  require_positive(node_rate, "the node's rate");
  require_positive(devices, "the number of devices");
  return node_rate / devices;
}

double aggregate_rate(double rate, double count) {
  require_positive(rate, "a rate");
  require_positive(count, "a count");
  return rate * count;
}

double endurance_steps(double rated_bytes, double written_bytes_per_step) {
  require_positive(rated_bytes, "rated bytes");
  require_positive(written_bytes_per_step, "bytes written per step");
  return rated_bytes / written_bytes_per_step;
}

double endurance_days(double rated_bytes, double written_bytes_per_step, double step_seconds) {
  require_positive(step_seconds, "a step's seconds");
  return endurance_steps(rated_bytes, written_bytes_per_step) * step_seconds / 86400;
}

double flash_life_bytes(double erase_cycles, double retention_gain, double capacity_bytes) {
  require_positive(erase_cycles, "erase cycles");
  require_positive(retention_gain, "the gain by shorter retention");
  require_positive(capacity_bytes, "capacity");
  return erase_cycles * retention_gain * capacity_bytes;
}

}  // namespace ballast::planner
