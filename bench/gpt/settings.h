// How a GPT is trained: batch, sequence, micro-batches, seed.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>

#include "model.h"

namespace ballast::gpt {

// horizontal: one micro-batch after another, each through the whole model (a pass each). vertical: all micro-batches of
// a layer before the next layer (one pass), which divides the parameter traffic by their number.
enum class MicroBatchOrder : std::uint8_t { horizontal, vertical };

struct TrainSettings {
  std::int64_t batch = 4;       // sequences per step, over all ranks and micro-batches
  std::int64_t sequence = 128;  // tokens per sequence; at most the shape's context
  std::int64_t micro_batches = 1;
  MicroBatchOrder order = MicroBatchOrder::horizontal;
  std::uint64_t seed = 0;  // of the initial parameters and of the batches
  int world_size = 1;
  int rank = 0;
  int threads = 0;  // of the maths; 0: as OMP_NUM_THREADS, affinity and CPU quota say
  std::function<void(std::uint64_t bytes)> admit_memory;  // asked before so much host memory is taken; may throw

  // Throws ConfigError with the numbers.
  void validate(const GptShape& shape) const;
};

}  // namespace ballast::gpt
