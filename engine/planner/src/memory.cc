// Memory in closed form.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/planner/memory.h>

#include <algorithm>

#include "require.h"

namespace ballast::planner {

double model_state_bytes(double parameters, int stage, double ranks, const StateBytes& bytes) {
  require_not_negative(parameters, "the number of parameters");
  require_stage(stage);
  require_positive(ranks, "the number of ranks");
  const double whole =
      (stage < 3 ? bytes.parameter : 0) + (stage < 2 ? bytes.gradient : 0) + (stage < 1 ? bytes.optimizer : 0);
  return parameters * (whole + (bytes.all() - whole) / ranks);
}

TierBytes tier_bytes(OffloadPlacement placement, double parameters, double ranks, int stage, double largest_unit) {
  require_not_negative(parameters, "the number of parameters");
  require_positive(ranks, "the number of ranks");
  require_not_negative(largest_unit, "the size of the largest unit");
  const StateBytes bytes;
  const double share = parameters / ranks;
  const double window = (bytes.parameter + bytes.gradient) * largest_unit;
  switch (placement) {
    case OffloadPlacement::none:
      return {model_state_bytes(parameters, stage, ranks) + (stage == 3 ? window : 0), 0, 0};
    case OffloadPlacement::optimizer_in_host:
      return {bytes.parameter * parameters, (bytes.gradient + bytes.optimizer) * share, 0};
    case OffloadPlacement::partitioned_in_host:
      // Gradients are fp32 in host memory, where they are summed.
      return {bytes.parameter * share + window, (4 + bytes.optimizer) * share, 0};
    case OffloadPlacement::all_in_host:
      return {window, (bytes.parameter + 4 + bytes.optimizer) * share, 0};
    case OffloadPlacement::parameters_host_rest_nvme:
      return {window, bytes.parameter * share, (4 + bytes.optimizer) * share};
    case OffloadPlacement::all_on_nvme:
      return {window, 0, (bytes.parameter + 4 + bytes.optimizer) * share};
  }
  throw ConfigError("no such placement");
}

double split_master_bytes(double moment_bytes, bool parameters_on_nvme) {
  require_positive(moment_bytes, "the bytes of a moment");
  return (parameters_on_nvme ? 4 : 2) + 2 * moment_bytes;
}

double largest_model(double memory_bytes, double bytes_per_parameter) {
  require_not_negative(memory_bytes, "memory");
  require_positive(bytes_per_parameter, "bytes per parameter");
  return memory_bytes / bytes_per_parameter;
}

double largest_model_on_devices(double device_bytes, int stage, double ranks, double model_parallel,
                                const StateBytes& bytes) {
  require_positive(model_parallel, "model parallelism");
  return model_parallel * largest_model(device_bytes, model_state_bytes(1, stage, ranks, bytes));
}

DeepSpeedEstimate deepspeed_estimate(const DeepSpeedCase& input) {
  require_not_negative(input.parameters, "the number of parameters");
  require_positive(input.gpus_per_node, "GPUs per node");
  require_positive(input.nodes, "the number of nodes");
  require_positive(input.buffer_factor, "the factor for buffers");
  const double p = input.parameters;
  const double gpus = input.gpus_per_node * input.nodes;
  const double start_up = 4 * input.gpus_per_node;  // an fp32 copy of every process of the node
  DeepSpeedEstimate result;
  if (input.stage == 2) {
    result.device_bytes = input.offload_optimizer ? 2 * p : 4 * p + 16 * p / gpus;
    result.host_bytes = (input.offload_optimizer ? std::max(start_up, 16.0) : start_up) * p * input.buffer_factor;
    return result;
  }
  if (input.stage != 3) throw ConfigError("DeepSpeed estimates memory for stages 2 and 3 only");
  if (input.offload_parameters && !input.offload_optimizer)
    throw ConfigError("DeepSpeed offloads parameters only together with the optimizer");
  const double window = 4 * input.largest_layer;
  if (!input.offload_optimizer) {
    result.device_bytes = window + 18 * p / gpus;
    result.host_bytes = start_up * input.largest_layer * input.buffer_factor;
  } else if (input.offload_parameters) {
    result.device_bytes = window;
    result.host_bytes = 18 * p / input.nodes * input.buffer_factor;
  } else {
    result.device_bytes = window + 2 * p / gpus;
    result.host_bytes = 16 * p / input.nodes * input.buffer_factor;
  }
  return result;
}

namespace {

void require_shape(const TransformerShape& shape) {
  require_positive(shape.layers, "the number of layers");
  require_positive(shape.hidden, "the hidden size");
}
void require_activations(const ActivationShape& of) {
  require_positive(of.batch, "the batch");
  require_positive(of.sequence, "the sequence");
  require_positive(of.blocks_per_checkpoint, "blocks per checkpoint");
}
// Of one block and token: 16 x hidden, and both score matrices of attention.
double block_elements(const TransformerShape& shape, double sequence) {
  require_positive(shape.heads, "the number of heads");
  return 16 * shape.hidden + 2 * shape.heads * sequence;
}

}  // namespace

double transformer_parameters(const TransformerShape& shape) {
  require_shape(shape);
  return 12 * shape.layers * shape.hidden * shape.hidden;
}

double transformer_state_bytes(const TransformerShape& shape) { return 20 * transformer_parameters(shape); }

double checkpoint_bytes(const TransformerShape& shape, const ActivationShape& of) {
  require_shape(shape);
  require_activations(of);
  return 2 * of.batch * of.sequence * shape.hidden * shape.layers / of.blocks_per_checkpoint;
}

double activation_bytes(const TransformerShape& shape, const ActivationShape& of) {
  require_shape(shape);
  require_activations(of);
  return 2 * of.batch * of.sequence * shape.layers * block_elements(shape, of.sequence);
}

double model_state_working_bytes(const TransformerShape& shape, double tiles) {
  require_positive(shape.hidden, "the hidden size");
  require_positive(tiles, "the number of tiles");
  return 4 * shape.hidden * 4 * shape.hidden / tiles;
}

double activation_working_elements(const TransformerShape& shape, const ActivationShape& of) {
  require_shape(shape);
  require_activations(of);
  return of.batch * of.sequence * of.blocks_per_checkpoint * block_elements(shape, of.sequence);
}

}  // namespace ballast::planner
