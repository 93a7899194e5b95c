// What the GPT's maths is tested with: a model whose parameters and gradients lie in plain memory, the same model's
// loss in double precision, written as the textbook does, and a simple Adam. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/random.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "gpt/math.h"
#include "gpt/rows.h"

namespace ballast::gpt::testing {

inline std::uint16_t bf16_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<std::uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
inline float float_of_bf16(std::uint16_t h) {
  const std::uint32_t bits = std::uint32_t{h} << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Uniform in (-1, 1), the same for a seed on every machine.
inline std::vector<float> noise(std::uint64_t seed, std::size_t count, float scale = 1.0f) {
  base::Random random(seed);
  std::vector<float> values(count);
  for (float& v : values) v = scale * static_cast<float>(2 * random.uniform() - 1);
  return values;
}

struct MemoryParameter {
  std::int64_t elements = 0;
  std::vector<float> master;
  std::vector<std::byte> bytes, gradient_bytes;
  DataType type = DataType::fp32, gradient_type = DataType::fp32;

  void publish() {
    for (std::int64_t i = 0; i < elements; ++i) {
      const float x = master[static_cast<std::size_t>(i)];
      if (type == DataType::fp32) {
        std::memcpy(bytes.data() + 4 * i, &x, 4);
      } else {
        const std::uint16_t h = type == DataType::bf16 ? bf16_of(x) : half_of(x);
        std::memcpy(bytes.data() + 2 * i, &h, 2);
      }
    }
  }
  // Cuts to half precision; the values here are normal in it.
  static std::uint16_t half_of(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const std::int32_t exponent = static_cast<std::int32_t>((bits >> 23) & 255) - 112;
    if (exponent <= 0) return static_cast<std::uint16_t>((bits >> 16) & 0x8000);
    return static_cast<std::uint16_t>(((bits >> 16) & 0x8000) | (static_cast<std::uint32_t>(exponent) << 10) |
                                      ((bits >> 13) & 1023));
  }
  float value(std::int64_t i) const {
    float x;
    rows::to_float(bytes.data(), type, i, &x, 1);
    return x;
  }
  float gradient(std::int64_t i) const {
    float x;
    rows::to_float(gradient_bytes.data(), gradient_type, i, &x, 1);
    return x;
  }
  View view() { return {bytes.data(), type}; }
  View gradient_view() { return {gradient_bytes.data(), gradient_type}; }
};

// Gradients of the tied table have two parts; the model adds them.
class MemoryModel {
 public:
  MemoryModel(const GptShape& shape, DataType type, DataType gradient_type, std::uint64_t seed, float scale = 0.3f)
      : shape_(shape) {
    std::uint64_t stream = seed * 1000;
    for (const GptUnit& unit : gpt_units(shape)) {
      units_.emplace_back();
      for (const ParameterSpec& spec : unit.parameters) {
        MemoryParameter p;
        p.elements = 1;
        for (const std::int64_t extent : spec.shape) p.elements *= extent;
        p.type = type;
        p.gradient_type = gradient_type;
        p.master = noise(++stream, static_cast<std::size_t>(p.elements), scale);
        if (spec.name.find("ln_") == 0 && spec.name.find("weight") != std::string::npos) {
          for (float& v : p.master) v += 1;
        }
        p.bytes.resize(static_cast<std::size_t>(p.elements) * element_bytes(type));
        p.gradient_bytes.resize(static_cast<std::size_t>(p.elements) * element_bytes(gradient_type));
        p.publish();
        units_.back().push_back(std::move(p));
      }
    }
    head_gradient_.assign(units_[0][0].gradient_bytes.size(), std::byte{0xFF});
  }

  std::vector<std::vector<MemoryParameter>>& units() { return units_; }
  const GptShape& shape() const { return shape_; }

  // One slot, forward and, unless scale is 0, backward. What a gradient buffer held before must not matter: poisoned.
  double run(GptMath& math, double gradient_scale, std::int64_t slot = 0) {
    const double loss = forward(math, gradient_scale, slot);
    if (gradient_scale != 0) backward(math, slot);
    return loss;
  }
  double forward(GptMath& math, double gradient_scale, std::int64_t slot) {
    math.embedding_forward(slot, views<EmbeddingViews>(0, false));
    for (std::int64_t i = 0; i < shape_.layers; ++i) math.block_forward(slot, i, views<BlockViews>(unit(i), false));
    const FinalViews last = views<FinalViews>(units_.size() - 1, false);
    return math.head_loss(slot, last, shape_.tie_embeddings ? units_[0][0].view() : last[final_unit::lm_head],
                          gradient_scale);
  }
  void backward(GptMath& math, std::int64_t slot) {
    for (auto& u : units_) {
      for (MemoryParameter& p : u) std::memset(p.gradient_bytes.data(), 0xFF, p.gradient_bytes.size());
    }
    const FinalViews last = views<FinalViews>(units_.size() - 1, true);
    View head = last[final_unit::lm_head];
    if (shape_.tie_embeddings) head = {head_gradient_.data(), units_[0][0].gradient_type};
    math.head_gradients(slot, last, head);
    for (std::int64_t i = shape_.layers; i-- > 0;) {
      math.block_backward(slot, i, views<BlockViews>(unit(i), false), views<BlockViews>(unit(i), true));
    }
    math.embedding_backward(slot, views<EmbeddingViews>(0, true));
  }
  float gradient(std::size_t u, std::size_t index, std::int64_t i) const {
    float value = units_[u][index].gradient(i);
    if (shape_.tie_embeddings && u == 0 && index == embedding::wte) {
      float head;
      rows::to_float(head_gradient_.data(), units_[0][0].gradient_type, i, &head, 1);
      value += head;
    }
    return value;
  }
  std::vector<float> all_gradients() const {
    std::vector<float> all;
    for (std::size_t u = 0; u < units_.size(); ++u) {
      for (std::size_t p = 0; p < units_[u].size(); ++p) {
        for (std::int64_t i = 0; i < units_[u][p].elements; ++i) all.push_back(gradient(u, p, i));
      }
    }
    return all;
  }

 private:
  static std::size_t unit(std::int64_t layer) { return static_cast<std::size_t>(layer) + 1; }
  template <class Views>
  Views views(std::size_t u, bool gradients) {
    Views result{};
    for (std::size_t i = 0; i < units_[u].size(); ++i) {
      result[i] = gradients ? units_[u][i].gradient_view() : units_[u][i].view();
    }
    return result;
  }

  GptShape shape_;
  std::vector<std::vector<MemoryParameter>> units_;
  std::vector<std::byte> head_gradient_;
};

// The loss in double precision. parameters[unit][index] as in gpt_units().
using DoubleParameters = std::vector<std::vector<std::vector<double>>>;

inline DoubleParameters double_parameters(MemoryModel& model) {
  DoubleParameters all;
  for (auto& unit : model.units()) {
    all.emplace_back();
    for (MemoryParameter& p : unit) {
      all.back().emplace_back();
      for (std::int64_t i = 0; i < p.elements; ++i) all.back().back().push_back(p.value(i));
    }
  }
  return all;
}

namespace reference {

using Matrix = std::vector<double>;

inline Matrix layer_norm(const Matrix& x, const Matrix& w, const Matrix& b, std::size_t rows, std::size_t c) {
  Matrix out(x.size());
  for (std::size_t r = 0; r < rows; ++r) {
    double mean = 0, variance = 0;
    for (std::size_t i = 0; i < c; ++i) mean += x[r * c + i];
    mean /= static_cast<double>(c);
    for (std::size_t i = 0; i < c; ++i) variance += (x[r * c + i] - mean) * (x[r * c + i] - mean);
    const double rstd = 1 / std::sqrt(variance / static_cast<double>(c) + 1e-5);
    for (std::size_t i = 0; i < c; ++i) out[r * c + i] = (x[r * c + i] - mean) * rstd * w[i] + b[i];
  }
  return out;
}

inline Matrix linear(const Matrix& x, const Matrix& w, const Matrix& b, std::size_t rows, std::size_t in,
                     std::size_t out) {
  Matrix y(rows * out);
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t j = 0; j < out; ++j) y[r * out + j] = b[j];
    for (std::size_t i = 0; i < in; ++i) {
      for (std::size_t j = 0; j < out; ++j) y[r * out + j] += x[r * in + i] * w[i * out + j];
    }
  }
  return y;
}

inline double gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}

}  // namespace reference

inline double double_loss(const GptShape& shape, const DoubleParameters& p, const std::vector<std::uint8_t>& tokens,
                          const std::vector<std::uint8_t>& targets, std::size_t sequence) {
  using reference::Matrix;
  const auto c = static_cast<std::size_t>(shape.width), heads = static_cast<std::size_t>(shape.heads), d = c / heads;
  const auto v = static_cast<std::size_t>(shape.vocabulary);
  const std::size_t rows = tokens.size();
  Matrix x(rows * c);
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t i = 0; i < c; ++i)
      x[r * c + i] = p[0][embedding::wte][tokens[r] * c + i] + p[0][embedding::wpe][r % sequence * c + i];
  }
  for (std::size_t layer = 1; layer + 1 < p.size(); ++layer) {
    const auto& b = p[layer];
    const Matrix n1 = reference::layer_norm(x, b[block::ln_1_weight], b[block::ln_1_bias], rows, c);
    const Matrix qkv = reference::linear(n1, b[block::c_attn_weight], b[block::c_attn_bias], rows, c, 3 * c);
    Matrix attended(rows * c, 0.0);
    for (std::size_t r = 0; r < rows; ++r) {
      const std::size_t begin = r / sequence * sequence;
      for (std::size_t h = 0; h < heads; ++h) {
        std::vector<double> weights;
        double sum = 0;
        for (std::size_t t = begin; t <= r; ++t) {
          double dot = 0;
          for (std::size_t i = 0; i < d; ++i) dot += qkv[r * 3 * c + h * d + i] * qkv[t * 3 * c + c + h * d + i];
          weights.push_back(std::exp(dot / std::sqrt(static_cast<double>(d))));
          sum += weights.back();
        }
        for (std::size_t t = begin; t <= r; ++t) {
          for (std::size_t i = 0; i < d; ++i) {
            attended[r * c + h * d + i] += weights[t - begin] / sum * qkv[t * 3 * c + 2 * c + h * d + i];
          }
        }
      }
    }
    const Matrix projected = reference::linear(attended, b[block::c_proj_weight], b[block::c_proj_bias], rows, c, c);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += projected[i];
    const Matrix n2 = reference::layer_norm(x, b[block::ln_2_weight], b[block::ln_2_bias], rows, c);
    Matrix hidden = reference::linear(n2, b[block::c_fc_weight], b[block::c_fc_bias], rows, c, 4 * c);
    for (double& h : hidden) h = reference::gelu(h);
    const Matrix out =
        reference::linear(hidden, b[block::mlp_c_proj_weight], b[block::mlp_c_proj_bias], rows, 4 * c, c);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += out[i];
  }
  const auto& last = p.back();
  const Matrix n = reference::layer_norm(x, last[final_unit::ln_f_weight], last[final_unit::ln_f_bias], rows, c);
  const Matrix& table = shape.tie_embeddings ? p[0][embedding::wte] : last[final_unit::lm_head];
  double loss = 0;
  std::vector<double> logits(v);
  for (std::size_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (std::size_t j = 0; j < v; ++j) {
      double dot = 0;
      for (std::size_t i = 0; i < c; ++i) dot += n[r * c + i] * table[j * c + i];
      logits[j] = dot;
      sum += std::exp(dot);
    }
    loss += std::log(sum) - logits[targets[r]];
  }
  return loss / static_cast<double>(rows);
}

}  // namespace ballast::gpt::testing
