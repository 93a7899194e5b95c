// Causal self-attention of one head of one sequence, as a task of one thread: products in blocks of query rows, each
// with the keys it may see.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "matmul.h"
#include "rows.h"

namespace ballast::gpt {

template <class T>
class Attention {
 public:
  // qkv: rows of 3 * width elements, queries, keys and values of all heads side by side; output rows of `width`.
  Attention(ProductContext& context, std::int64_t sequence, std::int64_t width, std::int64_t heads);

  static std::size_t scratch_bytes(std::int64_t sequence, std::int64_t head_width);  // per thread

  // Pointers to the first row of a sequence, shifted to the head.
  void forward(int thread, const T* qkv, T* output, std::byte* scratch) const;
  void backward(int thread, const T* qkv, const T* d_output, T* d_qkv, std::byte* scratch) const;

 private:
  struct Scratch;
  static Scratch divide(std::byte* memory, std::int64_t sequence, std::int64_t head_width);

  struct Block {
    std::int64_t first, rows, columns;  // query rows, and the keys [0, columns) that the last of them sees
    Product scores;                     // q k^T
    Product output;                     // p v
    Product d_probabilities;            // d_output v^T
    Product d_query;                    // d_scores k
    Product d_key;                      // d_scores^T q, added up over blocks
    Product d_value;                    // p^T d_output, likewise
  };
  std::int64_t sequence_, width_, head_width_;
  float scale_;
  std::vector<Block> blocks_;  // the last one first: it sees all keys, so it writes where others add
};

}  // namespace ballast::gpt
