// What became of a DeepSpeed configuration: Config::from_file reads one as it is, and Config::deepspeed then holds
// this. Key names and defaults are those of DeepSpeed's documentation (deepspeed.ai/docs/config-json) and sources.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ballast {

// One key of the file, in the file's order.
struct DeepSpeedLine {
  enum class Outcome : std::uint8_t {
    mapped,           // it says something about a run of this engine
    not_given,        // "auto", null, or a part of what is switched off
    without_meaning,  // nothing here corresponds to it, and the numbers do not depend on it
  };
  std::string key;     // dotted: "zero_optimization.stage"
  std::string value;   // as JSON, shortened
  std::string became;  // "zero_stage 3", or why there is nothing
  Outcome outcome = Outcome::mapped;
};

// Plain values; any thread may read them.
struct DeepSpeedFile {
  std::string name;  // of the file
  std::vector<DeepSpeedLine> lines;
  // "train_batch_size" and so on: of sequences. Nothing where the file does not say.
  std::optional<std::int64_t> train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps;

  // One line that names every key without meaning, for a log; empty where there is none.
  std::string without_meaning() const;

  // Sequences per step over all ranks, and micro-batches, as DeepSpeed derives them from what is given. Nothing for
  // what it leaves open. Throws ConfigError with the numbers where they contradict each other for so many ranks.
  struct Batch {
    std::optional<std::int64_t> sequences, micro_batches;
  };
  Batch batch(int ranks) const;
};

// The lines as a table for people: key, value, what it became.
std::string to_text(const DeepSpeedFile& file);

}  // namespace ballast
