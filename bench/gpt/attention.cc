// Attention: backward computes the probabilities again rather than keep them.
// SPDX-License-Identifier: Apache-2.0
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace ballast::gpt {
namespace {

constexpr std::int64_t kQueryRows = 128;

constexpr std::size_t aligned(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

template <class T>
struct Attention<T>::Scratch {
  float* scores;  // kQueryRows x sequence
  float* d_probabilities;
  T* probabilities;
  T* d_scores;
  float* d_key;  // sequence x head width
  float* d_value;
};

template <class T>
typename Attention<T>::Scratch Attention<T>::divide(std::byte* memory, std::int64_t sequence, std::int64_t head_width) {
  const auto square = static_cast<std::size_t>(std::min(kQueryRows, sequence) * sequence);
  const auto strip = static_cast<std::size_t>(sequence * head_width);
  const auto take = [&](std::size_t bytes) {
    std::byte* at = memory;
    memory += aligned(bytes);
    return static_cast<void*>(at);
  };
  Scratch s;
  s.scores = static_cast<float*>(take(square * sizeof(float)));
  s.d_probabilities = static_cast<float*>(take(square * sizeof(float)));
  s.probabilities = static_cast<T*>(take(square * sizeof(T)));
  s.d_scores = static_cast<T*>(take(square * sizeof(T)));
  s.d_key = static_cast<float*>(take(strip * sizeof(float)));
  s.d_value = static_cast<float*>(take(strip * sizeof(float)));
  return s;
}

template <class T>
std::size_t Attention<T>::scratch_bytes(std::int64_t sequence, std::int64_t head_width) {
  const auto square = static_cast<std::size_t>(std::min(kQueryRows, sequence) * sequence);
  const auto strip = static_cast<std::size_t>(sequence * head_width);
  return 2 * aligned(square * sizeof(float)) + 2 * aligned(square * sizeof(T)) + 2 * aligned(strip * sizeof(float));
}

template <class T>
Attention<T>::Attention(ProductContext& context, std::int64_t sequence, std::int64_t width, std::int64_t heads)
    : sequence_(sequence),
      width_(width),
      head_width_(width / heads),
      scale_(static_cast<float>(1.0 / std::sqrt(static_cast<double>(width / heads)))) {
  constexpr Scalar kType = std::is_same_v<T, float> ? Scalar::fp32 : Scalar::bf16;
  const std::int64_t d = head_width_, row = 3 * width;
  const std::int64_t count = (sequence + kQueryRows - 1) / kQueryRows;
  for (std::int64_t i = count - 1; i >= 0; --i) {
    const std::int64_t first = i * kQueryRows, r = std::min(kQueryRows, sequence - first), n = first + r;
    const bool adds = i != count - 1;
    blocks_.push_back(
        {first, r, n,
         Product(context,
                 {.m = r, .n = n, .k = d, .lda = row, .ldb = row, .ldc = n, .transpose_b = true, .inputs = kType}),
         Product(context,
                 {.m = r, .n = d, .k = n, .lda = n, .ldb = row, .ldc = width, .inputs = kType, .output = kType}),
         Product(context,
                 {.m = r, .n = n, .k = d, .lda = width, .ldb = row, .ldc = n, .transpose_b = true, .inputs = kType}),
         Product(context, {.m = r, .n = d, .k = n, .lda = n, .ldb = row, .ldc = row, .inputs = kType, .output = kType}),
         Product(context, {.m = n,
                           .n = d,
                           .k = r,
                           .lda = n,
                           .ldb = row,
                           .ldc = d,
                           .transpose_a = true,
                           .inputs = kType,
                           .accumulate = adds}),
         Product(context, {.m = n,
                           .n = d,
                           .k = r,
                           .lda = n,
                           .ldb = width,
                           .ldc = d,
                           .transpose_a = true,
                           .inputs = kType,
                           .accumulate = adds})});
  }
}

template <class T>
void Attention<T>::forward(int thread, const T* qkv, T* output, std::byte* scratch) const {
  const Scratch s = divide(scratch, sequence_, head_width_);
  const T* key = qkv + width_;
  const T* value = qkv + 2 * width_;
  for (const Block& block : blocks_) {
    block.scores.run(thread, qkv + block.first * 3 * width_, key, nullptr, s.scores);
    rows::causal_softmax(s.scores, s.probabilities, block.rows, block.columns, block.first, scale_);
    block.output.run(thread, s.probabilities, value, nullptr, output + block.first * width_);
  }
}

template <class T>
void Attention<T>::backward(int thread, const T* qkv, const T* d_output, T* d_qkv, std::byte* scratch) const {
  const Scratch s = divide(scratch, sequence_, head_width_);
  const T* key = qkv + width_;
  const T* value = qkv + 2 * width_;
  for (const Block& block : blocks_) {
    const T* query = qkv + block.first * 3 * width_;
    const T* d_out = d_output + block.first * width_;
    block.scores.run(thread, query, key, nullptr, s.scores);
    rows::causal_softmax(s.scores, s.probabilities, block.rows, block.columns, block.first, scale_);
    block.d_value.run(thread, s.probabilities, d_out, nullptr, s.d_value);
    block.d_probabilities.run(thread, d_out, value, nullptr, s.d_probabilities);
    rows::causal_softmax_backward(s.probabilities, s.d_probabilities, s.d_scores, block.rows, block.columns,
                                  block.first, scale_);
    block.d_query.run(thread, s.d_scores, key, nullptr, d_qkv + block.first * 3 * width_);
    block.d_key.run(thread, s.d_scores, query, nullptr, s.d_key);
  }
  for (std::int64_t t = 0; t < sequence_; ++t) {
    rows::convert(s.d_key + t * head_width_, d_qkv + t * 3 * width_ + width_, head_width_);
    rows::convert(s.d_value + t * head_width_, d_qkv + t * 3 * width_ + 2 * width_, head_width_);
  }
}

template class Attention<float>;
template class Attention<Bf16>;

}  // namespace ballast::gpt
