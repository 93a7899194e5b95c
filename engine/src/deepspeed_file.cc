// The batch that a DeepSpeed configuration asks for, and its mapping as text.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/engine/deepspeed.h>

#include <algorithm>

namespace ballast {

std::string DeepSpeedFile::without_meaning() const {
  std::string names;
  for (const DeepSpeedLine& line : lines)
    if (line.outcome == DeepSpeedLine::Outcome::without_meaning) names += (names.empty() ? "" : ", ") + line.key;
  if (names.empty()) return {};
  return name + ": these keys of DeepSpeed mean nothing here and change no numbers: " + names;
}

DeepSpeedFile::Batch DeepSpeedFile::batch(int ranks) const {
  const auto& all = train_batch_size;
  const auto& micro = train_micro_batch_size_per_gpu;
  const auto& steps = gradient_accumulation_steps;
  const std::int64_t world = ranks;
  const auto contradiction = [&](const std::string& numbers) {
    throw ConfigError(name + ": " + numbers + " with " + std::to_string(ranks) + (ranks == 1 ? " rank" : " ranks") +
                      "; run as many ranks as the file was written for, or say --batch and --micro-batches");
  };
  const auto text = [](std::int64_t value) { return std::to_string(value); };
  if (all && micro && steps && *all != *micro * *steps * world) {
    contradiction("train_batch_size " + text(*all) + " is not train_micro_batch_size_per_gpu " + text(*micro) +
                  " x gradient_accumulation_steps " + text(*steps) + " x ranks " + text(world) + " = " +
                  text(*micro * *steps * world));
  }
  if (all && micro) {
    if (*all % (*micro * world) != 0)
      contradiction("train_batch_size " + text(*all) + " does not divide by train_micro_batch_size_per_gpu " +
                    text(*micro) + " x ranks " + text(world));
    return {all, *all / (*micro * world)};
  }
  if (all) {
    const std::int64_t parts = steps.value_or(1);
    if (*all % (parts * world) != 0)
      contradiction("train_batch_size " + text(*all) + " does not divide by gradient_accumulation_steps " +
                    text(parts) + " x ranks " + text(world));
    return {all, parts};
  }
  if (micro) return {*micro * steps.value_or(1) * world, steps.value_or(1)};
  return {std::nullopt, steps};
}

std::string to_text(const DeepSpeedFile& file) {
  std::size_t key_width = 0, value_width = 0;
  for (const DeepSpeedLine& line : file.lines) {
    key_width = std::max(key_width, line.key.size());
    value_width = std::max(value_width, line.value.size());
  }
  std::string text = file.name + ": a DeepSpeed configuration; each of its keys, and what it became:\n";
  for (const DeepSpeedLine& line : file.lines) {
    text += "  " + line.key + std::string(key_width - line.key.size() + 2, ' ') + line.value +
            std::string(value_width - line.value.size() + 2, ' ') +
            (line.outcome == DeepSpeedLine::Outcome::without_meaning ? "- nothing: " : "-> ") + line.became + "\n";
  }
  return text;
}

}  // namespace ballast
