// Bytes that a training step moves, per parameter and link, in closed form. Pure; senseless inputs are a ConfigError.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>

namespace ballast::planner {

constexpr double kManyRanks = std::numeric_limits<double>::infinity();
constexpr double kInt8MomentBytes = 1 + 4.0 / 256;  // blocks of 256 with an fp32 scale

// What every rank sends in a step, in elements per parameter: 2 at stages 0 to 2, 3 at stage 3, times (N - 1) / N of
// the ring. ZeRO section 7; several micro-batches: one after another gather parameters for each of them, layer by layer
// (`vertical`) once.
struct CollectiveCase {
  int stage = 3;
  double ranks = kManyRanks;
  double micro_batches = 1;
  bool vertical = false;
  bool reduce_each_micro_batch = false;
};
double collective_elements(const CollectiveCase& input);

// Bytes per parameter over each link in one step of one micro-batch; per rank, states being partitioned.
struct LinkBytes {
  double host_to_device = 0, device_to_host = 0, nvme_read = 0, nvme_written = 0, network = 0;
};
enum class LinkPlacement : std::uint8_t {
  zero_offload,               // stage 2
  all_in_host,                // stage 3
  parameters_host_rest_nvme,  // stage 3, DeepSpeed's layout
  all_on_nvme,                // stage 3, DeepSpeed's layout
  split_master_on_nvme,       // this engine: everything on NVMe
};
LinkBytes link_bytes(LinkPlacement placement, double ranks, bool recompute = false);

// How optimizer states lie on NVMe.
enum class MasterLayout : std::uint8_t {
  fp32,   // fp32 master, moments and gradients beside bf16 parameters: DeepSpeed
  split,  // the bf16 parameter and a 16-bit remainder are the master: this engine
  none,   // the bf16 parameter is all there is (stochastic rounding); changes the numbers
};
struct NvmeLayout {
  MasterLayout master = MasterLayout::split;
  double moment_bytes = 4;         // of each of the two: 4, 2, or kInt8MomentBytes
  bool parameters_on_nvme = true;  // else in host memory
  bool fused = true;               // a unit is updated while its parameters are still in host memory
  bool recompute_reads = false;    // parameters are read once more to recompute
  bool gradients_on_nvme = false;  // fp32; DeepSpeed's layout has them there
};
struct NvmeBytes {
  double read = 0, written = 0;
  double total() const { return read + written; }
};
NvmeBytes nvme_bytes(const NvmeLayout& layout);
// "a-all", "a-dram-params", "a-all-recompute" (DeepSpeed); "b-...", "bf16mv-...", "c-..." (split master with moments in
// fp32, bf16, 8 bits); "d-sr-..." (no remainder); "mlp" (MLP-Offload): with "fused", "unfused", "hi-dram".
NvmeLayout nvme_layout(std::string_view name);

// What is left of NVMe traffic with a fraction of the states held in host memory. Cyclic access defeats LRU: without a
// fixed share or an alternating order nothing is saved.
double uncached_share(double cached_fraction, bool fixed_or_alternating = true);

// Bytes of host memory per parameter that one CPU Adam step reads and writes. fp32 layout 28; split master 26,
// 18, 14.06.
struct AdamLayout {
  MasterLayout master = MasterLayout::split;
  double moment_bytes = 4;
  double gradient_bytes = 2;
};
double adam_bytes(const AdamLayout& layout);
AdamLayout adam_layout(std::string_view name);  // "fp32", "fp32-grad32", "hilo", "hilo-bf16", "hilo-8bit"

// Speed-up where storage bounds the step and the bytes shrink to `bytes_ratio`; and the most that can be won where
// transfers also move from beside compute to under it: (x + 1) / max(x, r) at x = r.
double storage_bound_speed_up(double bytes_ratio);
double largest_speed_up(double bytes_ratio);

}  // namespace ballast::planner
