// Memory of a training run in closed form: bytes per tier by ZeRO stage and placement, transformer sizes, capacity. For
// what this engine reserves to the byte see run_plan.h; these are the formulas that published systems are compared by.
// All functions are pure and may be called from any thread; senseless inputs are a ConfigError that names them. Bytes
// are doubles, since a trillion parameters on a thousand ranks are no whole number of bytes each.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ballast::planner {

// Bytes per parameter of mixed-precision Adam.
struct StateBytes {
  double parameter = 2;
  double gradient = 2;
  double optimizer = 12;  // K of the ZeRO paper: fp32 master, first and second moment
  double all() const { return parameter + gradient + optimizer; }
};

// Model states on each of `ranks` devices: nothing is partitioned at stage 0, optimizer states from 1, gradients from
// 2, parameters at 3. ZeRO (arXiv 1910.02054), sections 3 and 5.
double model_state_bytes(double parameters, int stage, double ranks, const StateBytes& bytes = {});

// Where model states live when a tier below the device helps. ZeRO-Offload section 4, ZeRO-Infinity section 3.
enum class OffloadPlacement : std::uint8_t {
  none,                       // stages 0 to 3 on the device
  optimizer_in_host,          // ZeRO-Offload: stage 2, gradients and optimizer states in host memory
  partitioned_in_host,        // stage 3, parameters on the device; gradients and optimizer states in host memory
  all_in_host,                // stage 3
  parameters_host_rest_nvme,  // stage 3
  all_on_nvme,                // stage 3
};
struct TierBytes {
  double device = 0, host = 0, nvme = 0;
};
// Per rank. `stage` counts for `none` only; `largest_unit`: parameters that are gathered at once (2 bytes each and
// their gradients 2).
TierBytes tier_bytes(OffloadPlacement placement, double parameters, double ranks, int stage = 3,
                     double largest_unit = 0);

// Bytes per parameter that a layout of optimizer states takes on NVMe with everything there (or with the bf16 half in
// host memory): the split master, both moments in `moment_bytes` each.
double split_master_bytes(double moment_bytes, bool parameters_on_nvme);

// Parameters that fit so much memory.
double largest_model(double memory_bytes, double bytes_per_parameter);
// Parameters of the largest model whose states fit devices of so much memory each; a model is cut into `model_parallel`
// parts first.
double largest_model_on_devices(double device_bytes, int stage, double ranks, double model_parallel = 1,
                                const StateBytes& bytes = {});

// DeepSpeed's own estimator (deepspeed/runtime/zero: stage_1_and_2.py, stage3.py), with its factor of 1.5 for buffers.
struct DeepSpeedEstimate {
  double device_bytes = 0;  // per GPU
  double host_bytes = 0;    // per node
};
struct DeepSpeedCase {
  double parameters = 0, largest_layer = 0;
  double gpus_per_node = 1, nodes = 1;
  int stage = 3;
  bool offload_optimizer = false, offload_parameters = false;
  double buffer_factor = 1.5;
};
DeepSpeedEstimate deepspeed_estimate(const DeepSpeedCase& input);

// A transformer by its shape; ZeRO-Infinity (arXiv 2104.07857) section 3.
struct TransformerShape {
  double layers = 0, hidden = 0, heads = 0;
};
struct ActivationShape {
  double batch = 1, sequence = 1024;
  double blocks_per_checkpoint = 1;
};
double transformer_parameters(const TransformerShape& shape);              // equation 1
double transformer_state_bytes(const TransformerShape& shape);             // equation 2: 20 bytes per parameter
double checkpoint_bytes(const TransformerShape&, const ActivationShape&);  // equation 3
double activation_bytes(const TransformerShape&, const ActivationShape&);  // of all layers, none recomputed
// Equation 4: parameters and gradients of the largest operator, in `tiles` parts.
double model_state_working_bytes(const TransformerShape& shape, double tiles = 1);
double activation_working_elements(const TransformerShape&, const ActivationShape&);  // equation 5; x 2 for bytes

}  // namespace ballast::planner
