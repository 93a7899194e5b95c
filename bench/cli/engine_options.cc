// --engine, --set, and sizes on the command line.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/base/size.h>
#include <ballast/engine/deepspeed.h>

#include <charconv>
#include <cstdio>

#include "command.h"

namespace ballast::cli {

void EngineOptions::add_to(CLI::App& parser, bool engine_required) {
  CLI::Option* engine = parser.add_option("--engine", path_, "Engine configuration, JSON")->type_name("FILE");
  if (engine_required) engine->required();
  parser.add_option("--set", settings_, "Override a key of the configuration, such as budget.host=256MiB; may repeat")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
}

void EngineOptions::add_explain(CLI::App& parser) {
  parser.add_flag("--explain", explain_, "Print what became of each key of a DeepSpeed configuration");
}

Config EngineOptions::load() const {
  std::vector<std::pair<std::string, std::string>> overrides;
  for (const std::string& setting : settings_) {
    const std::size_t equals = setting.find('=');
    if (equals == setting.npos)
      throw ConfigError("--set " + setting.substr(0, 60) + ": wants KEY=VALUE, such as budget.host=256MiB");
    overrides.emplace_back(setting.substr(0, equals), setting.substr(equals + 1));
  }
  Config config =
      path_.empty() ? Config::from_json("{}", "configuration", overrides) : Config::from_file(path_, overrides);
  if (explain_)
    std::printf("%s\n", config.deepspeed ? to_text(*config.deepspeed).c_str()
                                         : "no DeepSpeed configuration: nothing is translated\n");
  return config;
}

BatchSizes batch_sizes(const Config& config, std::optional<std::int64_t> batch,
                       std::optional<std::int64_t> micro_batches, int ranks) {
  DeepSpeedFile::Batch file;
  if (config.deepspeed && !(batch && micro_batches)) file = config.deepspeed->batch(ranks);
  if (micro_batches && file.sequences && config.deepspeed->train_micro_batch_size_per_gpu)
    file.sequences = *config.deepspeed->train_micro_batch_size_per_gpu * *micro_batches * ranks;
  BatchSizes sizes;
  sizes.micro_batches = micro_batches.value_or(file.micro_batches.value_or(1));
  sizes.sequences = batch.value_or(file.sequences.value_or(4 * sizes.micro_batches * ranks));
  return sizes;
}

CLI::Validator whole_number() {
  return CLI::Validator(
      [](const std::string& text) {
        std::uint64_t value = 0;
        const char* const end = text.data() + text.size();
        const auto [at, error] = std::from_chars(text.data(), end, value);
        return error == std::errc() && at == end
                   ? std::string()
                   : "\"" + text.substr(0, 60) + "\" is no whole number from 0 to 2^64 - 1";
      },
      "");
}

std::uint64_t size_option(const std::string& option, const std::string& text) {
  const auto bytes = base::parse_size(text);
  if (!bytes || *bytes == 0)
    throw ConfigError(option + " must be a size with a unit, such as \"2GiB\", not \"" + text.substr(0, 60) + "\"");
  return *bytes;
}

}  // namespace ballast::cli
