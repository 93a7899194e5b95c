// The parts of a transformer that are no matrix products: loops over the rows (tokens) or columns of one range, to be
// called from the tasks of a pool. Each output element is summed in one order that depends on the shape alone, so no
// result depends on how the ranges are shared out. T is the type of activations: Bf16 or float. All matrices are
// row-major; `rows` are those from the given pointers on. No allocation, no threads.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/config.h>

#include <cstdint>

namespace ballast::gpt {

struct Bf16 {
  std::uint16_t bits;
};

namespace rows {

// Any element type to fp32 and back (from nearest even). `first` counts elements of source.
void to_float(const void* source, DataType type, std::int64_t first, float* target, std::int64_t elements);
void from_float(const float* source, void* target, DataType type, std::int64_t first, std::int64_t elements);
template <class T>
void convert(const float* source, T* target, std::int64_t elements);

// x[t] = wte[token[t]] + wpe[position of t], rows [first, last) of sequences of `sequence` tokens.
void embed(const std::uint32_t* tokens, const void* wte, DataType wte_type, const void* wpe, DataType wpe_type,
           float* x, std::int64_t sequence, std::int64_t width, std::int64_t first, std::int64_t last);

// sum = x + addend (where addend is not null), then out = layer norm of sum; mean and 1/deviation kept for backward.
struct NormForward {
  const float* x;
  const float* addend;  // null: none, and sum is not written
  float* sum;
  const float* weight;
  const float* bias;
  float* mean;
  float* rstd;
};
template <class T>
void layer_norm(const NormForward& a, T* out, std::int64_t rows, std::int64_t width);
// d_x = (d_residual, or nothing where null) + the gradient through the norm; narrow: the same in T, where not null.
struct NormBackward {
  const float* d_out;
  const float* x;
  const float* weight;
  const float* mean;
  const float* rstd;
  const float* d_residual;
  float* d_x;  // may be d_residual
};
template <class T>
void layer_norm_backward(const NormBackward& a, T* narrow, std::int64_t rows, std::int64_t width);
// Columns [first, last): d_weight = sum over rows of d_out * normalised x, d_bias = sum of d_out.
void layer_norm_gradients(const float* d_out, const float* x, const float* mean, const float* rstd, float* d_weight,
                          float* d_bias, std::int64_t rows, std::int64_t width, std::int64_t first, std::int64_t last);

// Columns [first, last): sums[c] = sum over rows of m[r][c].
template <class T>
void column_sums(const T* m, float* sums, std::int64_t rows, std::int64_t width, std::int64_t first, std::int64_t last);

void add(const float* a, const float* b, float* sum, std::int64_t elements);

// GELU in its tanh form: out = x * sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3).
template <class T>
void gelu(const T* x, T* out, std::int64_t elements);
// gradient *= gelu'(x)
template <class T>
void gelu_backward(const T* x, T* gradient, std::int64_t elements);

// Softmax over the first causal_first + i + 1 entries of row i of scaled scores; zeros behind, up to `columns`.
// Destroys the scores.
template <class T>
void causal_softmax(float* scores, T* probabilities, std::int64_t rows, std::int64_t columns, std::int64_t causal_first,
                    float scale);
// d_scores = p * (d_p - sum(p * d_p)) * scale over the same entries; zeros behind.
template <class T>
void causal_softmax_backward(const T* probabilities, const float* d_probabilities, T* d_scores, std::int64_t rows,
                             std::int64_t columns, std::int64_t causal_first, float scale);

// Per row: loss = -log softmax(logits)[target] in nats; d_logits = (softmax - onehot) * gradient_scale, where not null.
// Destroys the logits.
template <class T>
void cross_entropy(float* logits, std::int64_t stride, const std::uint32_t* targets, double* losses, T* d_logits,
                   std::int64_t d_stride, float gradient_scale, std::int64_t rows, std::int64_t vocabulary);

// out = sum of the rows of x that `indices` names, in that order; zeros for none.
void gather_sum(const float* x, const std::int32_t* indices, std::int64_t count, float* out, std::int64_t width);

// values[i] = mean-free normal deviate number first + i of the stream `key`, times deviation.
void fill_normal(std::uint64_t key, std::int64_t first, float* values, std::int64_t elements, float deviation);

}  // namespace rows
}  // namespace ballast::gpt
