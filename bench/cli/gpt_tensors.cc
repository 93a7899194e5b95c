// GPT-2's names and what is left out of them.
// SPDX-License-Identifier: Apache-2.0
#include "gpt_tensors.h"

#include <ballast/base/error.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

namespace ballast::cli {
namespace {

constexpr std::size_t kPieceElements = std::size_t{1} << 16;
// Files of the model with its head put this before all names but the head's.
constexpr const char* kPrefix = "transformer.";
constexpr const char* kHead = "lm_head.weight";

bool same_values(SafetensorsReader& from, std::size_t a, std::size_t b) {
  if (from.tensors()[a].shape != from.tensors()[b].shape) return false;
  const std::int64_t elements = from.tensors()[a].elements;
  std::vector<float> x, y;
  for (std::int64_t at = 0; at < elements; at += static_cast<std::int64_t>(kPieceElements)) {
    const auto count = std::min(kPieceElements, static_cast<std::size_t>(elements - at));
    x.resize(count);
    y.resize(count);
    from.read(a, at, x);
    from.read(b, at, y);
    if (std::memcmp(x.data(), y.data(), count * sizeof(float)) != 0) return false;
  }
  return true;
}

}  // namespace

std::string gpt_tensor_name(const std::string& unit, const std::string& parameter) {
  return unit == "embedding" || unit == "final" ? parameter : unit + "." + parameter;
}

std::string gpt_config_json(const gpt::GptShape& shape, const CheckpointReader& checkpoint) {
  std::size_t count = 0;
  for (const gpt::GptUnit& unit : gpt::gpt_units(shape)) {
    for (const ParameterSpec& parameter : unit.parameters) {
      const auto found = checkpoint.find(unit.name, parameter.name);
      if (!found || checkpoint.parameters()[*found].shape != parameter.shape) {
        throw ConfigError("the model is another one than that of " + checkpoint.path() + ", which has " +
                          (found ? "another shape of " : "no ") + unit.name + "/" + parameter.name);
      }
      ++count;
    }
  }
  if (count != checkpoint.parameters().size()) {
    throw ConfigError("the model is another one than that of " + checkpoint.path() + ": " + std::to_string(count) +
                      " tensors instead of " + std::to_string(checkpoint.parameters().size()));
  }
  const nlohmann::ordered_json config = {
      {"model_type", "gpt2"},           {"architectures", {"GPT2LMHeadModel"}},
      {"n_layer", shape.layers},        {"n_embd", shape.width},
      {"n_head", shape.heads},          {"n_positions", shape.context},
      {"vocab_size", shape.vocabulary}, {"activation_function", "gelu_new"},
      {"layer_norm_epsilon", 1e-5},     {"tie_word_embeddings", shape.tie_embeddings}};
  return config.dump(2) + "\n";
}

GptImport gpt_import(SafetensorsReader& from) {
  const std::string prefix = from.find(std::string(kPrefix) + "wte.weight") ? kPrefix : "";
  const auto matrix = [&](const std::string& name) {
    const auto found = from.find(prefix + name);
    if (!found || from.tensors()[*found].shape.size() != 2) {
      throw ConfigError("the safetensors are no GPT-2's: " +
                        (found ? "tensor " + prefix + name + " has " +
                                     std::to_string(from.tensors()[*found].shape.size()) + " dimensions instead of 2"
                               : "there is no tensor " + name));
    }
    return from.tensors()[*found].shape;
  };
  GptImport result;
  gpt::GptShape& shape = result.shape;
  const std::vector<std::int64_t> tokens = matrix("wte.weight"), positions = matrix("wpe.weight");
  shape.vocabulary = tokens[0];
  shape.width = tokens[1];
  shape.context = positions[0];
  shape.heads = 1;
  while (from.find(prefix + "h." + std::to_string(shape.layers) + ".ln_1.weight")) ++shape.layers;
  const auto head = from.find(kHead);
  shape.tie_embeddings = !head || same_values(from, *from.find(prefix + "wte.weight"), *head);
  shape.validate("the GPT-2 in the safetensors");
  for (gpt::GptUnit& unit : gpt::gpt_units(shape)) {
    result.units.push_back({std::move(unit.name), std::move(unit.parameters)});
  }
  result.options.name = [prefix](const ModelUnit& unit, const ParameterSpec& parameter) {
    return parameter.name == kHead ? kHead : prefix + gpt_tensor_name(unit.name, parameter.name);
  };
  // The mask, which some files keep with each block, is no parameter, and a tied head is there already.
  result.options.ignore = [tied = shape.tie_embeddings](const SafetensorsTensor& tensor) {
    const std::string& name = tensor.name;
    const bool mask = name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
    return mask || (tied && name == kHead);
  };
  return result;
}

}  // namespace ballast::cli
