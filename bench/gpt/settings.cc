// The checks of training settings, each with the numbers and what would do.
// SPDX-License-Identifier: Apache-2.0
#include "settings.h"

#include <ballast/base/error.h>

#include <string>

namespace ballast::gpt {
namespace {

std::string text(std::int64_t value) { return std::to_string(value); }

}  // namespace

void TrainSettings::validate(const GptShape& shape) const {
  shape.validate();
  if (batch < 1) throw ConfigError("--batch is " + text(batch) + "; it must be at least 1");
  if (micro_batches < 1) throw ConfigError("--micro-batches is " + text(micro_batches) + "; it must be at least 1");
  if (sequence < 1) throw ConfigError("--sequence is " + text(sequence) + "; it must be at least 1");
  if (sequence > shape.context) {
    throw ConfigError("--sequence " + text(sequence) + " is longer than the model's context of " + text(shape.context));
  }
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    throw ConfigError("rank " + text(rank) + " of " + text(world_size) + " ranks does not exist");
  }
  constexpr std::int64_t kTokensMax = std::int64_t{1} << 31;  // of a step
  if (batch > kTokensMax / sequence || micro_batches > kTokensMax) {
    throw ConfigError("--batch " + text(batch) + " x --sequence " + text(sequence) + " is more than " +
                      text(kTokensMax) + " tokens");
  }
  if (batch % (micro_batches * world_size) != 0) {
    throw ConfigError("--batch " + text(batch) + " does not divide by " + text(micro_batches) + " micro-batches x " +
                      text(world_size) + " ranks; a multiple of " + text(micro_batches * world_size) + " would");
  }
  if (shape.vocabulary < 256) {
    throw ConfigError("a vocabulary of " + text(shape.vocabulary) + " cannot hold bytes; it must be at least 256");
  }
  if (threads < 0 || threads > 4096) throw ConfigError("threads is " + text(threads) + "; it must be from 0 to 4096");
}

}  // namespace ballast::gpt
