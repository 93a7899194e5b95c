// The model's forward and backward, as loops over a pool of threads. T is the type of activations that enter products;
// the residual stream, norms' statistics, scores, logits and all sums are fp32.
// SPDX-License-Identifier: Apache-2.0
#include "math.h"

#include <ballast/base/check.h>
#include <ballast/base/error.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention.h"
#include "matmul.h"
#include "pool.h"
#include "rows.h"

namespace ballast::gpt {
namespace {

// One zeroed region that parts are cut from: taken and touched once, so that no step meets a page fault.
class Arena {
 public:
  explicit Arena(std::size_t bytes) : bytes_(bytes) {
    void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
      throw PlanError("no memory for " + std::to_string(bytes >> 20) + " MiB of activations: " + std::strerror(errno) +
                      "; take a smaller --batch or --sequence, or more --micro-batches");
    }
    base_ = static_cast<std::byte*>(at);
    (void)::madvise(at, bytes, MADV_HUGEPAGE);  // advice: where it is refused, plain pages do
    std::memset(at, 0, bytes);
  }
  ~Arena() { ::munmap(base_, bytes_); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  std::byte* base() const { return base_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  std::size_t bytes_;
};

constexpr std::int64_t kElementsPerTask = 16384;  // of a row loop: some microseconds
constexpr std::int64_t kColumnsPerTask = 64;
constexpr std::size_t kLogitBytesMax = std::size_t{32} << 20;

template <class T>
class Math final : public GptMath {
  static constexpr bool kPlain = std::is_same_v<T, float>;
  static constexpr Scalar kType = kPlain ? Scalar::fp32 : Scalar::bf16;
  static constexpr DataType kDataType = kPlain ? DataType::fp32 : DataType::bf16;

 public:
  Math(const GptShape& shape, const MathOptions& options, std::string note)
      : shape_(shape),
        options_(options),
        note_(std::move(note)),
        c_(shape.width),
        v_(shape.vocabulary),
        m_(options.sequences * options.sequence),
        logit_stride_((shape.vocabulary + 31) / 32 * 32),
        logit_rows_(logit_rows(m_, logit_stride_)),
        pool_(options.threads),
        context_(pool_.threads()),
        attention_(context_, options.sequence, shape.width, shape.heads) {
    make_products();
    std::size_t bytes = 0;
    lay_out(nullptr, bytes);
    if (options.admit_memory) options.admit_memory(bytes);
    arena_.emplace(bytes);
    bytes = 0;
    lay_out(arena_->base(), bytes);
    losses_.assign(static_cast<std::size_t>(m_), 0.0);
    tokens_.assign(static_cast<std::size_t>(m_ * options.slots), 0);
    targets_.assign(tokens_.size(), 0);
    first_of_.assign(static_cast<std::size_t>(v_) + 1, 0);
    next_of_ = first_of_;
    order_.assign(static_cast<std::size_t>(m_), 0);
    position_rows_.resize(static_cast<std::size_t>(m_));
    for (std::int64_t t = 0; t < options.sequence; ++t) {
      for (std::int64_t b = 0; b < options.sequences; ++b) {
        position_rows_[static_cast<std::size_t>(t * options.sequences + b)] =
            static_cast<std::int32_t>(b * options.sequence + t);
      }
    }
  }

  std::span<std::uint32_t> tokens(std::int64_t slot) override { return of_slot(tokens_, slot); }
  std::span<std::uint32_t> targets(std::int64_t slot) override { return of_slot(targets_, slot); }

  void embedding_forward(std::int64_t slot, const EmbeddingViews& p) override {
    current_ = {};
    const View wte = p[embedding::wte], wpe = p[embedding::wpe];
    pool_.run_ranges(m_, rows_per_task(c_), [&](std::int64_t first, std::int64_t last, int) {
      rows::embed(tokens(slot).data(), wte.data, wte.dtype, wpe.data, wpe.dtype, input(slot, 0), options_.sequence, c_,
                  first, last);
    });
  }

  void block_forward(std::int64_t slot, std::int64_t layer, const BlockViews& p) override {
    activations(slot, layer, p);
    mlp_out_->run(pool_, gelu_, weight(p[block::mlp_c_proj_weight], 4 * c_ * c_), small_[block::mlp_c_proj_bias],
                  wide_);
    elements(
        [&](std::int64_t at, std::int64_t n) { rows::add(middle_ + at, wide_ + at, input(slot, layer + 1) + at, n); });
  }

  double head_loss(std::int64_t slot, const FinalViews& p, View head, double gradient_scale) override {
    const float* x = input(slot, shape_.layers);
    const View gain = p[final_unit::ln_f_weight], shift = p[final_unit::ln_f_bias];
    rows::to_float(gain.data, gain.dtype, 0, head_vectors_, c_);
    rows::to_float(shift.data, shift.dtype, 0, head_vectors_ + c_, c_);
    norm(x, nullptr, nullptr, head_vectors_, head_vectors_ + c_, head_input_, head_mean_, head_rstd_);
    const void* table = weight(head, v_ * c_);
    const bool train = gradient_scale != 0;
    const double mean_scale = gradient_scale / static_cast<double>(m_);
    constexpr float kLargest = std::numeric_limits<float>::max();
    const float scale = mean_scale > kLargest ? std::numeric_limits<float>::infinity() : static_cast<float>(mean_scale);
    for (std::int64_t first = 0; first < m_; first += logit_rows_) {
      const std::int64_t count = std::min(logit_rows_, m_ - first);
      const TiledProduct& product = count == logit_rows_ ? *logits_product_ : *logits_tail_product_;
      product.run(pool_, head_input_ + first * c_, table, nullptr, logits_);
      pool_.run_ranges(count, rows_per_task(2 * v_), [&](std::int64_t row, std::int64_t last, int) {
        rows::cross_entropy(logits_ + row * logit_stride_, logit_stride_, targets(slot).data() + first + row,
                            losses_.data() + first + row,
                            train ? d_logits_ + (first + row) * logit_stride_ : static_cast<T*>(nullptr), logit_stride_,
                            scale, last - row, v_);
      });
    }
    double loss = 0;
    for (const double token_loss : losses_) loss += token_loss;
    if (train) {
      d_head_input_product_->run(pool_, d_logits_, table, nullptr, d_head_input_);
      norm_backward(d_head_input_, x, head_vectors_, head_mean_, head_rstd_, nullptr, gradient(slot));
    }
    return loss / static_cast<double>(m_);
  }

  void head_gradients(std::int64_t slot, const FinalViews& g, View head) override {
    norm_gradients(d_head_input_, input(slot, shape_.layers), head_mean_, head_rstd_, g[final_unit::ln_f_weight],
                   g[final_unit::ln_f_bias]);
    weight_gradient(*head_gradient_, d_logits_, head_input_, head);
  }

  void block_backward(std::int64_t slot, std::int64_t layer, const BlockViews& p, const BlockViews& g) override {
    if (current_ != Place{slot, layer}) activations(slot, layer, p);
    current_ = {};
    float* d = gradient(slot);
    const float* x = input(slot, layer);
    const T* narrow = narrowed(d);

    weight_gradient(*mlp_out_gradient_, gelu_, narrow, g[block::mlp_c_proj_weight]);
    bias_gradient(d, c_, g[block::mlp_c_proj_bias]);
    mlp_out_back_->run(pool_, narrow, weight(p[block::mlp_c_proj_weight], 4 * c_ * c_), nullptr, d_hidden_);
    pool_.run_ranges(m_ * 4 * c_, kElementsPerTask, [&](std::int64_t first, std::int64_t last, int) {
      rows::gelu_backward(hidden_ + first, d_hidden_ + first, last - first);
    });
    weight_gradient(*mlp_in_gradient_, norm_2_, d_hidden_, g[block::c_fc_weight]);
    bias_gradient(d_hidden_, 4 * c_, g[block::c_fc_bias]);
    mlp_in_back_->run(pool_, d_hidden_, weight(p[block::c_fc_weight], 4 * c_ * c_), nullptr, wide_);
    norm_gradients(wide_, middle_, mean_2_, rstd_2_, g[block::ln_2_weight], g[block::ln_2_bias]);
    narrow = norm_backward(wide_, middle_, small_[block::ln_2_weight], mean_2_, rstd_2_, d, d);

    weight_gradient(*attention_out_gradient_, attended_, narrow, g[block::c_proj_weight]);
    bias_gradient(d, c_, g[block::c_proj_bias]);
    attention_out_back_->run(pool_, narrow, weight(p[block::c_proj_weight], c_ * c_), nullptr, d_attended_);
    heads([&](std::int64_t row, std::int64_t column, int thread) {
      attention_.backward(thread, qkv_ + row * 3 * c_ + column, d_attended_ + row * c_ + column,
                          d_qkv_ + row * 3 * c_ + column, scratch(thread));
    });
    weight_gradient(*attention_in_gradient_, norm_1_, d_qkv_, g[block::c_attn_weight]);
    bias_gradient(d_qkv_, 3 * c_, g[block::c_attn_bias]);
    attention_in_back_->run(pool_, d_qkv_, weight(p[block::c_attn_weight], 3 * c_ * c_), nullptr, wide_);
    norm_gradients(wide_, x, mean_1_, rstd_1_, g[block::ln_1_weight], g[block::ln_1_bias]);
    norm_backward(wide_, x, small_[block::ln_1_weight], mean_1_, rstd_1_, d, d);
  }

  void embedding_backward(std::int64_t slot, const EmbeddingViews& g) override {
    // Rows of equal tokens, in order of position: a counting sort.
    const auto ids = tokens(slot);
    std::vector<std::int32_t>&first = first_of_, &next = next_of_;
    std::fill(first.begin(), first.end(), 0);
    for (const std::uint32_t id : ids) ++first[id + std::size_t{1}];
    for (std::size_t i = 0; i + 1 < first.size(); ++i) first[i + 1] += first[i];
    std::copy(first.begin(), first.end(), next.begin());
    for (std::size_t t = 0; t < ids.size(); ++t)
      order_[static_cast<std::size_t>(next[ids[t]]++)] = static_cast<std::int32_t>(t);
    const float* d = gradient(slot);
    table_gradient(
        g[embedding::wte], v_,
        [&](std::int64_t id) {
          const auto begin = static_cast<std::size_t>(first[static_cast<std::size_t>(id)]);
          return std::span<const std::int32_t>(order_).subspan(
              begin, static_cast<std::size_t>(first[static_cast<std::size_t>(id) + 1]) - begin);
        },
        d);
    const auto sequences = static_cast<std::size_t>(options_.sequences);
    table_gradient(
        g[embedding::wpe], shape_.context,
        [&](std::int64_t t) {
          if (t >= options_.sequence) return std::span<const std::int32_t>();
          return std::span<const std::int32_t>(position_rows_)
              .subspan(static_cast<std::size_t>(t) * sequences, sequences);
        },
        d);
  }

  std::uint64_t memory_bytes() const override { return arena_->bytes(); }
  const std::string& note() const override { return note_; }

 private:
  // Which block's activations the shared buffers hold.
  struct Place {
    std::int64_t slot = -1, layer = -1;
    friend bool operator==(const Place&, const Place&) = default;
  };

  static std::int64_t logit_rows(std::int64_t rows, std::int64_t stride) {
    const auto fit = static_cast<std::int64_t>(kLogitBytesMax / (static_cast<std::size_t>(stride) * sizeof(float)));
    return std::min(rows, std::max<std::int64_t>(64, fit / 64 * 64));
  }
  static std::int64_t rows_per_task(std::int64_t width) { return std::max<std::int64_t>(1, kElementsPerTask / width); }

  // The type that a weight gradient is multiplied into: its own where oneDNN can, else fp32.
  Scalar gradient_type() const { return !kPlain && options_.gradients == DataType::bf16 ? Scalar::bf16 : Scalar::fp32; }
  bool widens() const { return options_.parameters != kDataType; }
  bool narrows_gradients() const { return kPlain && options_.gradients != DataType::fp32; }

  void make_products() {
    const auto make = [&](std::optional<TiledProduct>& product, ProductShape shape) {
      shape.inputs = kType;
      product.emplace(context_, shape);
    };
    // y = x W + b; dx = dy W^T; dW = x^T dy
    const auto linear = [&](std::int64_t in, std::int64_t out, Scalar output, Scalar back,
                            std::optional<TiledProduct>& forward, std::optional<TiledProduct>& backward,
                            std::optional<TiledProduct>& gradient) {
      make(forward, {.m = m_, .n = out, .k = in, .lda = in, .ldb = out, .ldc = out, .output = output, .bias = true});
      make(backward,
           {.m = m_, .n = in, .k = out, .lda = out, .ldb = out, .ldc = in, .transpose_b = true, .output = back});
      make(gradient, {.m = in,
                      .n = out,
                      .k = m_,
                      .lda = in,
                      .ldb = out,
                      .ldc = out,
                      .transpose_a = true,
                      .output = gradient_type()});
    };
    linear(c_, 3 * c_, kType, Scalar::fp32, attention_in_, attention_in_back_, attention_in_gradient_);
    linear(c_, c_, Scalar::fp32, kType, attention_out_, attention_out_back_, attention_out_gradient_);
    linear(c_, 4 * c_, kType, Scalar::fp32, mlp_in_, mlp_in_back_, mlp_in_gradient_);
    linear(4 * c_, c_, Scalar::fp32, kType, mlp_out_, mlp_out_back_, mlp_out_gradient_);
    const std::int64_t s = logit_stride_;
    const ProductShape logits{.m = logit_rows_, .n = v_, .k = c_, .lda = c_, .ldb = c_, .ldc = s, .transpose_b = true};
    make(logits_product_, logits);
    if (const std::int64_t tail = m_ % logit_rows_; tail != 0) {
      ProductShape shape = logits;
      shape.m = tail;
      make(logits_tail_product_, shape);
    }
    make(d_head_input_product_, {.m = m_, .n = c_, .k = v_, .lda = s, .ldb = c_, .ldc = c_});
    make(head_gradient_,
         {.m = v_, .n = c_, .k = m_, .lda = s, .ldb = c_, .ldc = c_, .transpose_a = true, .output = gradient_type()});
  }

  // Cuts all buffers from memory (null: only counts the bytes).
  void lay_out(std::byte* memory, std::size_t& bytes) {
    const auto take = [&](auto*& pointer, std::int64_t count) {
      using Element = std::remove_reference_t<decltype(*pointer)>;
      if (memory != nullptr) pointer = reinterpret_cast<Element*>(memory + bytes);
      bytes += (static_cast<std::size_t>(count) * sizeof(Element) + 255) / 256 * 256;
    };
    const std::int64_t rows = m_ * c_;
    take(inputs_, options_.slots * (shape_.layers + 1) * rows);
    take(gradients_, options_.slots * rows);
    take(middle_, rows);
    take(wide_, rows);
    take(norm_1_, rows);
    take(norm_2_, rows);
    take(attended_, rows);
    take(d_attended_, rows);
    take(qkv_, 3 * rows);
    take(d_qkv_, 3 * rows);
    take(hidden_, 4 * rows);
    take(gelu_, 4 * rows);
    take(d_hidden_, 4 * rows);
    if (!kPlain) take(narrow_, rows);
    take(head_input_, rows);
    take(d_head_input_, rows);
    take(logits_, logit_rows_ * logit_stride_);
    take(d_logits_, m_ * logit_stride_);
    for (float** statistic : {&mean_1_, &rstd_1_, &mean_2_, &rstd_2_, &head_mean_, &head_rstd_}) take(*statistic, m_);
    take(vectors_, kVectors * c_);
    take(head_vectors_, 2 * c_);
    take(sums_, 2 * 4 * c_);
    const auto per_thread =
        static_cast<std::int64_t>(Attention<T>::scratch_bytes(options_.sequence, shape_.head_width()) +
                                  static_cast<std::size_t>(c_) * sizeof(float) + 64);
    scratch_stride_ = static_cast<std::size_t>(per_thread + 255) / 256 * 256;
    take(scratch_, static_cast<std::int64_t>(scratch_stride_) * pool_.threads());
    const std::int64_t largest = std::max(4 * c_, v_) * c_;
    if (widens()) take(widened_, largest);
    if (narrows_gradients()) take(wide_gradient_, largest);
  }

  std::span<std::uint32_t> of_slot(std::vector<std::uint32_t>& ids, std::int64_t slot) {
    return std::span(ids).subspan(static_cast<std::size_t>(slot * m_), static_cast<std::size_t>(m_));
  }
  float* input(std::int64_t slot, std::int64_t layer) {
    return inputs_ + (slot * (shape_.layers + 1) + layer) * m_ * c_;
  }
  float* gradient(std::int64_t slot) { return gradients_ + slot * m_ * c_; }
  std::byte* scratch(int thread) { return scratch_ + static_cast<std::size_t>(thread) * scratch_stride_; }

  // body(first element, elements) over the m x c elements of a row buffer.
  template <class Body>
  void elements(Body&& body) {
    pool_.run_ranges(m_ * c_, kElementsPerTask,
                     [&](std::int64_t first, std::int64_t last, int) { body(first, last - first); });
  }
  // body(first row of a sequence, first column of a head, thread)
  template <class Body>
  void heads(Body&& body) {
    pool_.run(options_.sequences * shape_.heads, [&](std::int64_t task, int thread) {
      body(task / shape_.heads * options_.sequence, task % shape_.heads * shape_.head_width(), thread);
    });
  }

  // A block up to the input of its last product.
  void activations(std::int64_t slot, std::int64_t layer, const BlockViews& p) {
    load_small({{block::ln_1_weight, p[block::ln_1_weight], c_},
                {block::ln_1_bias, p[block::ln_1_bias], c_},
                {block::c_attn_bias, p[block::c_attn_bias], 3 * c_},
                {block::c_proj_bias, p[block::c_proj_bias], c_},
                {block::ln_2_weight, p[block::ln_2_weight], c_},
                {block::ln_2_bias, p[block::ln_2_bias], c_},
                {block::c_fc_bias, p[block::c_fc_bias], 4 * c_},
                {block::mlp_c_proj_bias, p[block::mlp_c_proj_bias], c_}});
    const float* x = input(slot, layer);
    norm(x, nullptr, nullptr, small_[block::ln_1_weight], small_[block::ln_1_bias], norm_1_, mean_1_, rstd_1_);
    attention_in_->run(pool_, norm_1_, weight(p[block::c_attn_weight], 3 * c_ * c_), small_[block::c_attn_bias], qkv_);
    heads([&](std::int64_t row, std::int64_t column, int thread) {
      attention_.forward(thread, qkv_ + row * 3 * c_ + column, attended_ + row * c_ + column, scratch(thread));
    });
    attention_out_->run(pool_, attended_, weight(p[block::c_proj_weight], c_ * c_), small_[block::c_proj_bias], wide_);
    norm(x, wide_, middle_, small_[block::ln_2_weight], small_[block::ln_2_bias], norm_2_, mean_2_, rstd_2_);
    mlp_in_->run(pool_, norm_2_, weight(p[block::c_fc_weight], 4 * c_ * c_), small_[block::c_fc_bias], hidden_);
    pool_.run_ranges(m_ * 4 * c_, kElementsPerTask, [&](std::int64_t first, std::int64_t last, int) {
      rows::gelu(hidden_ + first, gelu_ + first, last - first);
    });
    current_ = {slot, layer};
  }

  // Biases and norms as fp32, at small_[index].
  struct SmallVector {
    std::size_t index;
    View view;
    std::int64_t elements;
  };
  void load_small(std::initializer_list<SmallVector> vectors) {
    float* at = vectors_;
    for (const SmallVector& vector : vectors) {
      rows::to_float(vector.view.data, vector.view.dtype, 0, at, vector.elements);
      small_[vector.index] = at;
      at += vector.elements;
    }
    BALLAST_CHECK(at <= vectors_ + kVectors * c_);
  }

  // The matrix as products take it: itself, or widened into a buffer that the next call reuses.
  const void* weight(View view, std::int64_t count) {
    if (view.dtype == kDataType) return view.data;
    BALLAST_CHECK(widened_ != nullptr && kPlain);
    pool_.run_ranges(count, 4 * kElementsPerTask, [&](std::int64_t first, std::int64_t last, int) {
      rows::to_float(view.data, view.dtype, first, widened_ + first, last - first);
    });
    return widened_;
  }

  void weight_gradient(const TiledProduct& product, const T* x, const T* d, View target) {
    const bool direct = (target.dtype == DataType::bf16) == (product.shape().output == Scalar::bf16);
    if (direct) return product.run(pool_, x, d, nullptr, target.data);
    BALLAST_CHECK(wide_gradient_ != nullptr);
    product.run(pool_, x, d, nullptr, wide_gradient_);
    pool_.run_ranges(product.shape().m * product.shape().n, 4 * kElementsPerTask,
                     [&](std::int64_t first, std::int64_t last, int) {
                       rows::from_float(wide_gradient_ + first, target.data, target.dtype, first, last - first);
                     });
  }
  template <class Element>
  void bias_gradient(const Element* d, std::int64_t width, View target) {
    pool_.run_ranges(width, kColumnsPerTask, [&](std::int64_t first, std::int64_t last, int) {
      rows::column_sums(d, sums_, m_, width, first, last);
      rows::from_float(sums_ + first, target.data, target.dtype, first, last - first);
    });
  }
  // table row i = the sum of the rows of d that rows_of(i) names
  template <class RowsOf>
  void table_gradient(View target, std::int64_t table_rows, RowsOf&& rows_of, const float* d) {
    pool_.run_ranges(table_rows, rows_per_task(c_), [&](std::int64_t first, std::int64_t last, int thread) {
      auto* sum = reinterpret_cast<float*>(scratch(thread));
      for (std::int64_t i = first; i < last; ++i) {
        const std::span<const std::int32_t> indices = rows_of(i);
        rows::gather_sum(d, indices.data(), static_cast<std::int64_t>(indices.size()), sum, c_);
        rows::from_float(sum, target.data, target.dtype, i * c_, c_);
      }
    });
  }

  void norm(const float* x, const float* addend, float* sum, const float* weight, const float* bias, T* out,
            float* mean, float* rstd) {
    pool_.run_ranges(m_, rows_per_task(c_), [&](std::int64_t first, std::int64_t last, int) {
      const std::int64_t at = first * c_;
      rows::layer_norm({x + at, addend == nullptr ? nullptr : addend + at, sum == nullptr ? nullptr : sum + at, weight,
                        bias, mean + first, rstd + first},
                       out + at, last - first, c_);
    });
  }
  // Returns d_x in T.
  const T* norm_backward(const float* d_out, const float* x, const float* weight, const float* mean, const float* rstd,
                         const float* d_residual, float* d_x) {
    pool_.run_ranges(m_, rows_per_task(c_), [&](std::int64_t first, std::int64_t last, int) {
      const std::int64_t at = first * c_;
      rows::layer_norm_backward({d_out + at, x + at, weight, mean + first, rstd + first,
                                 d_residual == nullptr ? nullptr : d_residual + at, d_x + at},
                                kPlain ? static_cast<T*>(nullptr) : narrow_ + at, last - first, c_);
    });
    if constexpr (kPlain) {
      return d_x;
    } else {
      return narrow_;
    }
  }
  void norm_gradients(const float* d_out, const float* x, const float* mean, const float* rstd, View weight_target,
                      View bias_target) {
    float* d_weight = sums_;
    float* d_bias = sums_ + c_;
    pool_.run_ranges(c_, kColumnsPerTask, [&](std::int64_t first, std::int64_t last, int) {
      rows::layer_norm_gradients(d_out, x, mean, rstd, d_weight, d_bias, m_, c_, first, last);
      rows::from_float(d_weight + first, weight_target.data, weight_target.dtype, first, last - first);
      rows::from_float(d_bias + first, bias_target.data, bias_target.dtype, first, last - first);
    });
  }
  const T* narrowed(const float* d) {
    if constexpr (kPlain) {
      return d;
    } else {
      elements([&](std::int64_t at, std::int64_t n) { rows::convert(d + at, narrow_ + at, n); });
      return narrow_;
    }
  }

  static constexpr std::int64_t kVectors = 13;  // widths of all biases and norms of a block

  const GptShape shape_;
  const MathOptions options_;
  const std::string note_;
  const std::int64_t c_, v_, m_;  // width, vocabulary, tokens of a micro-batch
  const std::int64_t logit_stride_, logit_rows_;
  WorkPool pool_;
  ProductContext context_;
  Attention<T> attention_;
  std::optional<TiledProduct> attention_in_, attention_in_back_, attention_in_gradient_, attention_out_,
      attention_out_back_, attention_out_gradient_, mlp_in_, mlp_in_back_, mlp_in_gradient_, mlp_out_, mlp_out_back_,
      mlp_out_gradient_, logits_product_, logits_tail_product_, d_head_input_product_, head_gradient_;

  std::optional<Arena> arena_;
  float* inputs_ = nullptr;     // slot, layer: what enters the block; the last: what leaves the last
  float* gradients_ = nullptr;  // slot: of the residual stream
  float* middle_ = nullptr;     // the residual stream between attention and MLP
  float* wide_ = nullptr;
  T *norm_1_ = nullptr, *norm_2_ = nullptr, *attended_ = nullptr, *d_attended_ = nullptr, *qkv_ = nullptr,
    *d_qkv_ = nullptr, *hidden_ = nullptr, *gelu_ = nullptr, *d_hidden_ = nullptr, *narrow_ = nullptr,
    *head_input_ = nullptr, *d_logits_ = nullptr;
  float *d_head_input_ = nullptr, *logits_ = nullptr;
  float *mean_1_ = nullptr, *rstd_1_ = nullptr, *mean_2_ = nullptr, *rstd_2_ = nullptr, *head_mean_ = nullptr,
        *head_rstd_ = nullptr;
  float *vectors_ = nullptr, *head_vectors_ = nullptr, *sums_ = nullptr, *widened_ = nullptr, *wide_gradient_ = nullptr;
  std::byte* scratch_ = nullptr;
  std::size_t scratch_stride_ = 0;
  std::array<const float*, block::kCount> small_{};
  Place current_;
  std::vector<double> losses_;
  std::vector<std::uint32_t> tokens_, targets_;
  std::vector<std::int32_t> first_of_, next_of_;  // of each token, where its rows begin in order_
  std::vector<std::int32_t> order_, position_rows_;
};

}  // namespace

std::unique_ptr<GptMath> GptMath::create(const GptShape& shape, const MathOptions& options) {
  const std::string threads = std::to_string(options.threads) + (options.threads == 1 ? " thread" : " threads");
  const std::string isa = ProductContext::isa_name();
  if (options.parameters == DataType::bf16 && !options.always_widen && ProductContext::bf16_products()) {
    return std::make_unique<Math<Bf16>>(shape, options,
                                        "bf16 products with fp32 sums (oneDNN, " + isa + "), " + threads);
  }
  std::string note = "fp32 products (oneDNN, " + isa + "), " + threads;
  if (options.parameters == DataType::fp16) {
    note += "; fp16 parameters are widened to fp32, as oneDNN has no fp16 product on CPUs";
  } else if (options.parameters == DataType::bf16) {
    note += options.always_widen
                ? "; bf16 parameters are widened to fp32, as asked"
                : "; bf16 parameters are widened to fp32, as this CPU has no bf16 product (AVX-512 is the least)";
  }
  return std::make_unique<Math<float>>(shape, options, std::move(note));
}

}  // namespace ballast::gpt
