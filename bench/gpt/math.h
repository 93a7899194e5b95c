// GptMath: forward and backward of a GPT on the CPU, one unit at a time, with parameters and gradients wherever the
// caller has them. Losses and gradients are the same bits for any number of threads.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/config.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "model.h"

namespace ballast::gpt {

// A parameter or gradient in the caller's memory. Unlike a Tensor it owes nothing to a lease: what is enqueued keeps
// it.
struct View {
  void* data = nullptr;
  DataType dtype = DataType::bf16;
};
using EmbeddingViews = std::array<View, embedding::kCount>;
using BlockViews = std::array<View, block::kCount>;
using FinalViews = std::array<View, final_unit::kCount>;  // [lm_head] unused where embeddings are tied

struct MathOptions {
  std::int64_t sequences = 1;   // per micro-batch
  std::int64_t sequence = 128;  // tokens of each
  std::int64_t slots = 1;       // micro-batches whose activations are held at once
  DataType parameters = DataType::bf16;
  DataType gradients = DataType::fp32;
  int threads = 1;
  bool always_widen = false;                              // multiply in fp32 even where bf16 products exist
  std::function<void(std::uint64_t bytes)> admit_memory;  // asked before so much is taken; may throw
};

// One thread at a time. All memory is taken by create(). Each block keeps its input alone (per slot); backward computes
// the rest again. A slot goes through: tokens, embedding_forward, block_forward of each layer in turn, head_loss; then
// for training head_gradients (before another slot's head_loss), block_backward from the last layer down,
// embedding_backward.
class GptMath {
 public:
  static std::unique_ptr<GptMath> create(const GptShape& shape, const MathOptions& options);
  virtual ~GptMath() = default;

  // sequences * sequence bytes each, to be filled in before the slot's forward; target t is the byte after token t.
  virtual std::span<std::uint32_t> tokens(std::int64_t slot) = 0;
  virtual std::span<std::uint32_t> targets(std::int64_t slot) = 0;

  virtual void embedding_forward(std::int64_t slot, const EmbeddingViews& parameters) = 0;
  virtual void block_forward(std::int64_t slot, std::int64_t layer, const BlockViews& parameters) = 0;
  // Returns the mean loss in nats. gradient_scale: what the gradients are multiplied by (a loss scale); 0: the loss
  // alone. head is {vocabulary, width}: lm_head, or wte where tied.
  virtual double head_loss(std::int64_t slot, const FinalViews& parameters, View head, double gradient_scale) = 0;
  // The gradients of what head_loss was given; needs no parameters.
  virtual void head_gradients(std::int64_t slot, const FinalViews& gradients, View head) = 0;
  virtual void block_backward(std::int64_t slot, std::int64_t layer, const BlockViews& parameters,
                              const BlockViews& gradients) = 0;
  virtual void embedding_backward(std::int64_t slot, const EmbeddingViews& gradients) = 0;

  virtual std::uint64_t memory_bytes() const = 0;
  virtual const std::string& note() const = 0;  // what multiplies, for a log
};

}  // namespace ballast::gpt
