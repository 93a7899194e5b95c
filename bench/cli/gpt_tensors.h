// The reference GPT's parameters under the names that GPT-2's files in safetensors have.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/safetensors.h>

#include <string>

#include "gpt/model.h"

namespace ballast::cli {

// A parameter's tensor: "h.0.attn.c_attn.weight", "wte.weight".
std::string gpt_tensor_name(const std::string& unit, const std::string& parameter);

// config.json beside an export, which tells other tools the rest of the shape. Throws ConfigError where the checkpoint
// is of another shape.
std::string gpt_config_json(const gpt::GptShape& shape, const CheckpointReader& checkpoint);

// What makes an import of a GPT-2, from the tensors alone; the output projection is the token embedding where there is
// none, or the same again. Throws ConfigError where the tensors are no GPT-2's.
struct GptImport {
  std::vector<ModelUnit> units;
  ImportOptions options;
  gpt::GptShape shape;  // heads: 1, which no tensor shows
};
GptImport gpt_import(SafetensorsReader& from);

}  // namespace ballast::cli
