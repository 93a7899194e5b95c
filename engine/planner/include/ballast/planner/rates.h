// Time in closed form: rates of links, arithmetic intensity and efficiency, lower bounds of a step by lane, endurance.
// SI units throughout: bytes, seconds, flop/s. Pure; senseless inputs are a ConfigError.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

namespace ballast::planner {

// --- arithmetic intensity and efficiency (ZeRO-Infinity section 4) ---------------------------------------------------

enum class Moved : std::uint8_t { parameters_and_gradients, optimizer_states, activations };
struct IntensityCase {
  Moved moved = Moved::parameters_and_gradients;
  double batch = 1, sequence = 1024;             // per GPU; activations do not depend on them
  double hidden = 0, blocks_per_checkpoint = 1;  // activations only
};
// Flop per byte: seq x batch; a quarter of it; 24 x hidden x blocks per checkpoint.
double arithmetic_intensity(const IntensityCase& input);
// Share of peak without overlap (equation 6), or with transfers wholly under compute.
double efficiency(double intensity, double bytes_per_second, double peak_flops);
double overlapped_efficiency(double intensity, double bytes_per_second, double peak_flops);
double required_bandwidth(double wanted_efficiency, double intensity, double peak_flops);

// ZeRO-Infinity, table 3: what a machine of other peak needs, from 3 GB/s of slow memory on each of 512 devices of
// 70 TFLOPS (the aggregate counts: each rank updates its share), and 1 byte between devices for 1000 flop.
double slow_memory_bandwidth_per_device(double peak_flops_per_device, double devices);
double device_to_device_bandwidth(double peak_flops_per_device);

// --- compute ---------------------------------------------------------------------------------------------------------

// Flop per parameter and token: forward 2, backward 4, recomputing forward 2.
constexpr double kFlopsPerParameterToken = 6, kFlopsWithRecompute = 8;
double step_flops(double parameters, double tokens, double flops_per_parameter_token = kFlopsWithRecompute);
double seconds_of(double work, double per_second);  // bytes, flop or tokens
double share_of_peak(double parameters, double tokens_per_second, double flops_per_parameter_token, double peak_flops);
// Generation with all weights (2 bytes each) read from slow memory for each token of a batch.
double streamed_tokens_per_second(double parameters, double batch, double bytes_per_second);

// --- bounds ----------------------------------------------------------------------------------------------------------

// Reads and writes of one drive take turns (duplex 1, the default), run independently (2), or gain a measured factor in
// between: (R / r + W / w) / duplex, at least the longer of the two.
double nvme_seconds(double read_bytes, double written_bytes, double read_rate, double write_rate, double duplex = 1);

struct StepWork {  // per rank and step
  double flops = 0, host_to_device = 0, device_to_host = 0, nvme_read = 0, nvme_written = 0, memory = 0, network = 0;
};
struct StepRates {
  double flops = 0, host_to_device = 0, device_to_host = 0, nvme_read = 0, nvme_write = 0, memory = 0, network = 0;
  double nvme_duplex = 1;
  double copies_duplex = 2;  // both directions of the device link at once: 2 where neither slows the other
};
struct StepBound {  // seconds a step would take if this alone were slow
  double compute = 0, nvme = 0, host_to_device = 0, device_to_host = 0, copies = 0, cpu = 0, collective = 0;
  double largest() const;
  std::string_view limiting() const;  // the name of the largest
};
// A lane without work takes no time, whatever its rate.
StepBound step_bound(const StepWork& work, const StepRates& rates);

// CPU Adam is bound by memory: 28 bytes per parameter in the fp32 layout (adam_bytes()).
double cpu_adam_seconds(double parameters, double bytes_per_parameter, double memory_bytes_per_second);

// --- links and drives ------------------------------------------------------------------------------------------------

double pcie_rate(double transfers_per_second, double lanes, double code);  // one way; code: 128/130, 242/256
double pcie_measured_rate(int generation, double lanes);                   // what copies reach: 0.76 to 0.88 of that
double memory_rate(double transfers_per_second, double channels);          // 8 bytes each
double network_rate(double bits_per_second, double ports);
double rate_per_device(double node_rate, double devices);
double aggregate_rate(double rate, double count);

// Steps until the bytes that a drive is rated for are written.
double endurance_steps(double rated_bytes, double written_bytes_per_step);
double endurance_days(double rated_bytes, double written_bytes_per_step, double step_seconds);
// Of flash that keeps data for a shorter time than rated.
double flash_life_bytes(double erase_cycles, double retention_gain, double capacity_bytes);

}  // namespace ballast::planner
