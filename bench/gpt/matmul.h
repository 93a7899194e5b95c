// Matrix products on oneDNN. A product is cut into tiles by its shape alone; each tile is one single-threaded oneDNN
// primitive made in advance, and a WorkPool runs them. oneDNN's own threads are not used: its split (over the inner
// dimension too) follows the thread count, and with it the rounding; here the bits are the same for any count.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <dnnl.hpp>
#include <memory>
#include <string>
#include <vector>

#include "pool.h"

namespace ballast::gpt {

enum class Scalar : std::uint8_t { bf16, fp32 };
constexpr std::size_t scalar_bytes(Scalar type) { return type == Scalar::bf16 ? 2 : 4; }

// c[m][n] = (accumulate ? c : 0) + (bias ? bias[n] : 0) + sum over k of a[m][k] b[k][n]
struct ProductShape {
  std::int64_t m = 0, n = 0, k = 0;
  std::int64_t lda = 0, ldb = 0, ldc = 0;  // elements between rows as stored
  bool transpose_a = false;                // a is stored as k rows of m
  bool transpose_b = false;                // b is stored as n rows of k
  Scalar inputs = Scalar::bf16;
  Scalar output = Scalar::fp32;  // of bf16 inputs either; of fp32 inputs fp32
  bool bias = false;             // fp32
  bool accumulate = false;       // fp32 output only
};

// What all products of one model share: the oneDNN engine and, per thread of the pool, a stream and scratch memory.
class ProductContext {
 public:
  explicit ProductContext(int threads);
  ~ProductContext();
  ProductContext(const ProductContext&) = delete;
  ProductContext& operator=(const ProductContext&) = delete;

  // True where this CPU multiplies bf16 faster than by reference code (ONEDNN_MAX_CPU_ISA counts).
  static bool bf16_products();
  static std::string isa_name();

  int threads() const { return static_cast<int>(lanes_.size()); }

 private:
  friend class Product;
  struct Lane {
    dnnl::stream stream;
    std::vector<std::byte> scratch;
    dnnl::memory scratch_memory;
  };
  void reserve_scratch(std::size_t bytes);
  dnnl::engine engine_;
  std::vector<Lane> lanes_;
};

// One product of fixed shape as a single primitive, for tasks that run on one thread each. run() on different threads
// at once is fine. The context outlives it.
class Product {
 public:
  Product(ProductContext& context, const ProductShape& shape);
  Product(Product&&) noexcept;
  ~Product();
  void run(int thread, const void* a, const void* b, const float* bias, void* c) const;

 private:
  struct Arguments;
  ProductContext* context_;
  dnnl::matmul primitive_;
  mutable std::vector<Arguments> arguments_;  // one per thread, and touched by it alone
};

// One large product, cut into tiles.
class TiledProduct {
 public:
  TiledProduct(ProductContext& context, const ProductShape& shape);
  void run(WorkPool& pool, const void* a, const void* b, const float* bias, void* c) const;
  std::int64_t tiles() const { return rows_ * columns_; }
  const ProductShape& shape() const { return shape_; }

 private:
  ProductShape shape_;
  std::int64_t tile_m_, tile_n_, rows_, columns_;
  std::vector<Product> kinds_;  // inner, right edge, bottom edge, corner: as far as they differ
  int right_ = 0, bottom_ = 0, corner_ = 0;
};

// Makes oneDNN single-threaded on the calling thread while it lives, then restores what was set.
class SingleThreadedProducts {
 public:
  SingleThreadedProducts();
  ~SingleThreadedProducts();
  SingleThreadedProducts(const SingleThreadedProducts&) = delete;
  SingleThreadedProducts& operator=(const SingleThreadedProducts&) = delete;

 private:
  int before_;
};

}  // namespace ballast::gpt
