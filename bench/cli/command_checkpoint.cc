// ballast checkpoint: what a checkpoint or a committed run holds, whether it is whole, and its parameters from and to
// safetensors.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/base/size.h>
#include <ballast/engine/checkpoint.h>
#include <ballast/engine/safetensors.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "command.h"
#include "display.h"
#include "gpt_tensors.h"
#include "interrupt.h"
#include "output_file.h"

namespace ballast::cli {
namespace {

struct Options {
  std::string from, to, json;
  std::string shard_bytes = "4GiB", model, dtype;
  bool exact = false;
};

// A storage path of several, as nvme.paths has them, or one, whatever is in its name.
std::vector<std::string> paths_of(const std::string& text) {
  std::error_code error;
  if (std::filesystem::exists(text, error)) return {text};
  std::vector<std::string> paths;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t comma = std::min(text.find(',', at), text.size());
    paths.push_back(text.substr(at, comma - at));
    at = comma + 1;
  }
  return paths;
}

std::int64_t elements_of(const CheckpointReader& reader) {
  std::int64_t sum = 0;
  for (const StoredParameter& parameter : reader.parameters()) sum += parameter.elements;
  return sum;
}

nlohmann::ordered_json describe(const CheckpointReader& reader) {
  nlohmann::ordered_json out;
  out["path"] = reader.path();
  out["step"] = reader.step();
  out["world_size"] = reader.world_size();
  out["parameters"] = elements_of(reader);
  out["bytes"] = reader.bytes();
  out["loss_scale"] = reader.loss_scale();
  out["settings"] = nlohmann::ordered_json::parse(reader.settings());
  out["tensors"] = nlohmann::ordered_json::array();
  for (const StoredParameter& parameter : reader.parameters()) {
    out["tensors"].push_back({{"unit", parameter.unit},
                              {"name", parameter.name},
                              {"shape", parameter.shape},
                              {"dtype", to_string(parameter.dtype)},
                              {"group", parameter.group},
                              {"trainable", parameter.trainable},
                              {"step_count", parameter.step_count}});
  }
  return out;
}

void publish(OutputFile& file, const CheckpointReader& reader) {
  if (!file.wanted()) return;
  file.publish(describe(reader).dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

void print_heading(const CheckpointReader& reader) {
  std::printf("%s: step %llu, %s parameters in %zu tensors, %s of states, written by %d rank%s\n",
              reader.path().c_str(), static_cast<unsigned long long>(reader.step()),
              count_text(static_cast<double>(elements_of(reader))).c_str(), reader.parameters().size(),
              base::format_size(reader.bytes()).c_str(), reader.world_size(), reader.world_size() == 1 ? "" : "s");
}

int inspect(const Options& options) {
  OutputFile json(options.json);
  const CheckpointReader reader(paths_of(options.from));
  print_heading(reader);
  std::printf("settings: %s\n", reader.settings().c_str());
  std::vector<std::pair<std::string, std::string>> rows;
  for (const StoredParameter& parameter : reader.parameters()) {
    std::string shape;
    for (const std::int64_t dimension : parameter.shape) {
      shape += (shape.empty() ? "" : " x ") + std::to_string(dimension);
    }
    rows.emplace_back(parameter.unit + "/" + parameter.name,
                      (shape.empty() ? "scalar" : shape) + ", " + std::string(to_string(parameter.dtype)) +
                          (parameter.trainable ? ", step " + std::to_string(parameter.step_count) : ", frozen"));
  }
  print_table(rows);
  publish(json, reader);
  return 0;
}

int verify(const Options& options) {
  OutputFile json(options.json);
  CheckpointReader reader(paths_of(options.from));
  reader.verify();
  print_heading(reader);
  std::printf("every chunk is what was written\n");
  publish(json, reader);
  return 0;
}

int export_to(const Options& options) {
  OutputFile json(options.json);
  ExportOptions how;
  how.shard_bytes = size_option("--shard", options.shard_bytes);
  how.exact = options.exact;
  how.name = [](const StoredParameter& parameter) { return gpt_tensor_name(parameter.unit, parameter.name); };
  how.check_interrupt = &InterruptGuard::check;
  CheckpointReader reader(paths_of(options.from));
  std::string config;
  if (!options.model.empty()) config = gpt_config_json(gpt::GptShape::from_file(options.model), reader);
  const int files = export_safetensors(reader, options.to, how);
  if (!config.empty()) OutputFile(options.to + "/config.json").publish(config);
  print_heading(reader);
  std::printf("exported to %s: %d safetensors file%s\n", options.to.c_str(), files, files == 1 ? "" : "s");
  publish(json, reader);
  return 0;
}

// DIR itself where it is named as a checkpoint is, else the first checkpoint in it.
std::string imported_path(const std::string& directory) {
  std::filesystem::path path = directory;
  if (!path.has_filename()) path = path.parent_path();
  const std::string name = path.filename().string();
  const bool itself = name.starts_with("step-") && name.size() > 5 &&
                      std::all_of(name.begin() + 5, name.end(), [](char c) { return c >= '0' && c <= '9'; });
  const std::filesystem::path folder = itself ? path.parent_path() : path;
  std::error_code error;
  for (std::filesystem::directory_iterator at(folder.empty() ? "." : folder, error), end; !error && at != end;
       at.increment(error)) {
    const std::string other = at->path().filename().string();
    if (other.starts_with("step-") || other.ends_with(".manifest")) {
      throw ConfigError(folder.string() + " holds " + other +
                        " of another run, which would go on instead; name another folder");
    }
  }
  return itself ? path.string() : (path / "step-0").string();
}

int import_from(const Options& options) {
  OutputFile json(options.json);
  const std::string path = imported_path(options.to);
  SafetensorsReader from(options.from);
  GptImport what = gpt_import(from);
  what.options.check_interrupt = &InterruptGuard::check;
  for (const DataType type : {DataType::bf16, DataType::fp16, DataType::fp32}) {
    if (options.dtype == to_string(type)) what.options.dtype = type;
  }
  std::printf("a GPT-2: %lld layers, width %lld, context %lld, vocabulary %lld, %s output projection\n",
              static_cast<long long>(what.shape.layers), static_cast<long long>(what.shape.width),
              static_cast<long long>(what.shape.context), static_cast<long long>(what.shape.vocabulary),
              what.shape.tie_embeddings ? "tied" : "its own");
  import_safetensors(from, what.units, path, what.options);
  const CheckpointReader reader({path});
  print_heading(reader);
  publish(json, reader);
  return 0;
}

}  // namespace

std::vector<Command> add_checkpoint(CLI::App& app) {
  CLI::App* checkpoint =
      app.add_subcommand("checkpoint", "Look into checkpoints and committed runs; parameters from and to safetensors");
  checkpoint->require_subcommand(1);
  std::vector<Command> commands;
  const auto add = [&](const char* name, const char* text, int (*run)(const Options&)) {
    auto options = std::make_shared<Options>();
    CLI::App* parser = checkpoint->add_subcommand(name, text);
    parser->add_option("--json", options->json, "Write what was found to FILE")->type_name("FILE");
    commands.push_back({parser, [options, run] { return run(*options); }});
    return std::pair(parser, options);
  };
  const auto reads = [](CLI::App* parser, Options& options) {
    parser
        ->add_option("directory", options.from,
                     "A checkpoint, a folder of checkpoints (the newest), or a run's nvme.paths, separated by commas")
        ->type_name("DIR")
        ->required();
  };
  const auto [inspecting, inspected] = add("inspect", "What it holds", inspect);
  reads(inspecting, *inspected);
  const auto [verifying, verified] = add("verify", "Read every chunk and check it", verify);
  reads(verifying, *verified);
  const auto [exporting, exported] = add("export", "Its parameters as safetensors", export_to);
  reads(exporting, *exported);
  exporting->add_option("output", exported->to, "Folder for the safetensors files")->type_name("OUT_DIR")->required();
  exporting->add_option("--shard", exported->shard_bytes, "Bytes of one file at most")
      ->type_name("SIZE")
      ->capture_default_str();
  exporting->add_flag("--exact", exported->exact, "The masters, as F32, instead of what the device computes with");
  exporting->add_option("--model", exported->model, "Shape of the model: writes config.json, for other tools, as well")
      ->type_name("FILE");
  const auto [importing, imported] = add(
      "import", "A GPT-2 in safetensors as a checkpoint of step 0, for train --checkpoint DIR --resume", import_from);
  importing
      ->add_option("safetensors", imported->from, "A safetensors file, or a folder with one or with shards and index")
      ->type_name("SAFETENSORS")
      ->required();
  importing->add_option("directory", imported->to, "Folder for the checkpoint, DIR/step-0")
      ->type_name("DIR")
      ->required();
  importing
      ->add_option("--dtype", imported->dtype, "Round all to this (to nearest even) instead of keeping what is there")
      ->check(CLI::IsMember({"bf16", "fp16", "fp32"}));
  return commands;
}

}  // namespace ballast::cli
