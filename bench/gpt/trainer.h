// GptTrainer: trains a GPT on the tokens of files through the engine's public interface, as any other trainer would.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/engine.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "data.h"
#include "model.h"
#include "settings.h"

namespace ballast::gpt {

struct StepResult {
  double loss = 0;       // mean over this rank's part of the batch, nats per token, unscaled
  double grad_norm = 0;  // before clipping; NaN or infinity where the step was discarded
  double learning_rate = 0;
  bool updated = true;  // false: discarded, because a gradient was not finite
};

// One thread at a time. The engine must outlive the trainer.
class GptTrainer {
 public:
  // Registers the units and the expected order with the engine; the caller then calls engine.commit() and
  // engine.initialize(trainer.fill()). Takes the memory of all activations. Throws ConfigError for settings that do not
  // fit the shape or the data.
  GptTrainer(Engine& engine, const GptShape& shape, const TrainSettings& settings,
             std::shared_ptr<const TokenData> data);
  ~GptTrainer();
  GptTrainer(const GptTrainer&) = delete;
  GptTrainer& operator=(const GptTrainer&) = delete;

  // GPT-2's initial values, a pure function of (seed, parameter, element). Valid as long as the trainer.
  Engine::Fill fill() const;

  // One optimizer step on the batch of that index: the same tokens whatever ran before. learning_rate: the engine's own
  // where nothing is given. Discards where gradients are not finite; throws Error after kDiscardsMax of these in a row
  // (kDiscardsMaxScaled with a dynamic loss scale, which needs some to find its value).
  StepResult step(std::uint64_t index, std::optional<double> learning_rate = {});
  static constexpr int kDiscardsMax = 5;
  static constexpr int kDiscardsMaxScaled = 20;

  // The index that step() is called with next after the committed step of these bytes, which it had handed to
  // Step::update(). Throws ConfigError where they are not a GptTrainer's. *differs: what of data, seed,
  // batch, sequence, micro-batches and learning rate is not as it was then, so that the run is not the one that would
  // have gone on; empty where all is.
  std::uint64_t next_step(std::span<const std::byte> user_bytes, std::optional<double> learning_rate,
                          std::string* differs) const;

  // Mean loss over one batch of that index, drawn from `data` (the training data where nothing is given) by another
  // stream than the training batches; updates nothing. The data must have passed require_sequence and require_below.
  double evaluate(std::uint64_t index, const TokenData* data = nullptr);

  std::uint64_t tokens_per_step() const;   // over all ranks
  std::uint64_t activation_bytes() const;  // host memory that the maths holds
  const std::string& maths_note() const;   // one line: what multiplies, and on how many threads

 private:
  class Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace ballast::gpt
