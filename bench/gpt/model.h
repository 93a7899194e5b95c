// The shape of a GPT and the units of parameters that it trains: what a model file says, checked, and nothing computed.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/engine.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ballast::gpt {

// A GPT-2: learned positions, pre-norm blocks with biases, GELU (tanh form), a final layer norm.
struct GptShape {
  std::int64_t layers = 0;
  std::int64_t width = 0;
  std::int64_t heads = 0;    // divides width
  std::int64_t context = 0;  // the longest sequence
  std::int64_t vocabulary = 0;
  bool tie_embeddings = true;  // the output projection is the token embedding

  // {"type": "gpt", "layers": ..., "width": ..., "heads": ..., "context": ..., "vocabulary": ..., "tie_embeddings":
  // true} All but tie_embeddings must be there. Throws ConfigError naming the file, the key and the value (unknown
  // keys: the nearest known one), or the line and column where the text is no JSON or repeats a key.
  static GptShape from_file(const std::string& path);
  static GptShape from_json(std::string_view text, const std::string& name = "model");

  // Throws ConfigError, its text starting with `name`.
  void validate(const std::string& name = "model") const;
  std::int64_t parameters() const;  // of a valid shape; fits for every valid shape
  std::int64_t head_width() const { return width / heads; }

  friend bool operator==(const GptShape&, const GptShape&) = default;
};

// Parameter groups of the units below.
constexpr int kDecayGroup = 0;    // matrices
constexpr int kNoDecayGroup = 1;  // biases and layer norms

struct GptUnit {
  std::string name;
  std::vector<ParameterSpec> parameters;
};

// Places within the units that gpt_units() returns.
namespace embedding {
enum : std::uint32_t { wte, wpe, kCount };
}
namespace block {
enum : std::uint32_t {
  ln_1_weight,
  ln_1_bias,
  c_attn_weight,
  c_attn_bias,
  c_proj_weight,
  c_proj_bias,
  ln_2_weight,
  ln_2_bias,
  c_fc_weight,
  c_fc_bias,
  mlp_c_proj_weight,
  mlp_c_proj_bias,
  kCount
};
}
namespace final_unit {
enum : std::uint32_t { ln_f_weight, ln_f_bias, lm_head, kCount };  // lm_head only where embeddings are not tied
}

// In forward order: "embedding", "h.0" ... "h.N-1", "final". Matrices multiply from the right (y = x W), row-major, as
// GPT-2 stores them: attn.c_attn.weight is {width, 3 * width}; wte and lm_head are {vocabulary, width}.
std::vector<GptUnit> gpt_units(const GptShape& shape);

// The order in which one training pass over those units acquires them, with the gradients of `slots` micro-batches
// (more than one: the vertical order).
std::vector<ExpectedAccess> gpt_access_order(const GptShape& shape, const std::vector<UnitId>& units, int slots = 1);

}  // namespace ballast::gpt
