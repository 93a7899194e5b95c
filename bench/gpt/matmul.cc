// Tiles and primitives. The OpenMP runtime is whichever oneDNN brings along, so its two functions are looked up at run
// time rather than linked: a second runtime beside it would not know of the first.
// SPDX-License-Identifier: Apache-2.0
#include "matmul.h"

#include <ballast/base/error.h>
#include <dlfcn.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>

namespace ballast::gpt {
namespace {

using Md = dnnl::memory::desc;
using Dims = dnnl::memory::dims;

struct OpenMp {
  int (*get_max_threads)() = nullptr;
  void (*set_num_threads)(int) = nullptr;
};
const OpenMp& open_mp() {
  static const OpenMp functions = [] {
    OpenMp f;
    f.get_max_threads = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
    f.set_num_threads = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
    return f;
  }();
  return functions;
}

dnnl::memory::data_type dnnl_type(Scalar type) {
  return type == Scalar::bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

Md matrix_md(std::int64_t rows, std::int64_t columns, Scalar type, std::int64_t stride, bool transposed) {
  return Md({rows, columns}, dnnl_type(type), transposed ? Dims{1, stride} : Dims{stride, 1});
}

dnnl::matmul::primitive_desc describe(const dnnl::engine& engine, const ProductShape& s) {
  const Md a = matrix_md(s.m, s.k, s.inputs, s.lda, s.transpose_a);
  const Md b = matrix_md(s.k, s.n, s.inputs, s.ldb, s.transpose_b);
  const Md c = matrix_md(s.m, s.n, s.output, s.ldc, false);
  const Md bias({1, s.n}, dnnl::memory::data_type::f32, Dims{s.n, 1});
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (s.accumulate) {
    dnnl::post_ops post_ops;
    post_ops.append_sum(1.0f);
    attributes.set_post_ops(post_ops);
  }
  return s.bias ? dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, bias, c), attributes, engine)
                : dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, c), attributes, engine);
}

std::string text_of(const ProductShape& s) {
  return std::to_string(s.m) + " x " + std::to_string(s.n) + " x " + std::to_string(s.k) +
         (s.inputs == Scalar::bf16 ? " in bf16" : " in fp32");
}

// Evenly sized pieces, a multiple of `grain` each, that are at most `most` long.
std::int64_t piece(std::int64_t total, std::int64_t most, std::int64_t grain) {
  if (total <= most) return total;
  const std::int64_t pieces = (total + most - 1) / most;
  const std::int64_t even = (total + pieces - 1) / pieces;
  return std::min(total, (even + grain - 1) / grain * grain);
}

}  // namespace

SingleThreadedProducts::SingleThreadedProducts() : before_(0) {
  const OpenMp& omp = open_mp();
  if (omp.get_max_threads == nullptr || omp.set_num_threads == nullptr) return;
  before_ = omp.get_max_threads();
  if (before_ != 1) omp.set_num_threads(1);
}

SingleThreadedProducts::~SingleThreadedProducts() {
  if (before_ > 1) open_mp().set_num_threads(before_);
}

ProductContext::ProductContext(int threads) : engine_(dnnl::engine::kind::cpu, 0) {
  lanes_.resize(static_cast<std::size_t>(threads));
  for (Lane& lane : lanes_) lane.stream = dnnl::stream(engine_);
  reserve_scratch(64);
}

ProductContext::~ProductContext() = default;

void ProductContext::reserve_scratch(std::size_t bytes) {
  for (Lane& lane : lanes_) {
    if (lane.scratch.size() >= bytes + 64 && lane.scratch_memory) continue;
    lane.scratch.assign(bytes + 64, std::byte{0});
    lane.scratch_memory = dnnl::memory();
    void* aligned = lane.scratch.data();
    std::size_t space = lane.scratch.size();
    std::align(64, bytes, aligned, space);
    lane.scratch_memory =
        dnnl::memory(Md({static_cast<std::int64_t>(bytes)}, dnnl::memory::data_type::u8, dnnl::memory::format_tag::a),
                     engine_, aligned);
  }
}

bool ProductContext::bf16_products() {
  static const bool fast = [] {
    const SingleThreadedProducts single;
    ProductShape shape{.m = 64, .n = 64, .k = 64, .lda = 64, .ldb = 64, .ldc = 64};
    try {
      return std::string(describe(dnnl::engine(dnnl::engine::kind::cpu, 0), shape).impl_info_str()).find("ref") ==
             std::string::npos;
    } catch (const dnnl::error&) {
      return false;
    }
  }();
  return fast;
}

std::string ProductContext::isa_name() {
  switch (dnnl::get_effective_cpu_isa()) {
    case dnnl::cpu_isa::sse41:
      return "SSE4.1";
    case dnnl::cpu_isa::avx:
      return "AVX";
    case dnnl::cpu_isa::avx2:
      return "AVX2";
    case dnnl::cpu_isa::avx2_vnni:
      return "AVX2-VNNI";
    case dnnl::cpu_isa::avx512_core:
      return "AVX-512";
    case dnnl::cpu_isa::avx512_core_vnni:
      return "AVX-512 VNNI";
    case dnnl::cpu_isa::avx512_core_bf16:
      return "AVX-512 BF16";
    case dnnl::cpu_isa::avx512_core_amx:
      return "AMX";
    default:
      return "the best instructions oneDNN finds";
  }
}

struct Product::Arguments {
  dnnl::memory a, b, bias, c;
  std::unordered_map<int, dnnl::memory> list;
};

Product::Product(ProductContext& context, const ProductShape& shape) : context_(&context) {
  const SingleThreadedProducts single;
  try {
    const auto description = describe(context.engine_, shape);
    primitive_ = dnnl::matmul(description);
    context.reserve_scratch(description.scratchpad_desc().get_size());
    for (int i = 0; i < context.threads(); ++i) {
      Arguments arguments;
      arguments.a = dnnl::memory(description.src_desc(), context.engine_, DNNL_MEMORY_NONE);
      arguments.b = dnnl::memory(description.weights_desc(), context.engine_, DNNL_MEMORY_NONE);
      arguments.c = dnnl::memory(description.dst_desc(), context.engine_, DNNL_MEMORY_NONE);
      arguments.list = {{DNNL_ARG_SRC, arguments.a}, {DNNL_ARG_WEIGHTS, arguments.b}, {DNNL_ARG_DST, arguments.c}};
      if (shape.bias) {
        arguments.bias = dnnl::memory(description.bias_desc(), context.engine_, DNNL_MEMORY_NONE);
        arguments.list.emplace(DNNL_ARG_BIAS, arguments.bias);
      }
      arguments_.push_back(std::move(arguments));
    }
  } catch (const dnnl::error& error) {
    throw Error("oneDNN has no matrix product " + text_of(shape) + " on this CPU: " + error.what());
  }
}

Product::Product(Product&&) noexcept = default;
Product::~Product() = default;

void Product::run(int thread, const void* a, const void* b, const float* bias, void* c) const {
  const SingleThreadedProducts single;
  Arguments& arguments = arguments_[static_cast<std::size_t>(thread)];
  ProductContext::Lane& lane = context_->lanes_[static_cast<std::size_t>(thread)];
  arguments.a.set_data_handle(const_cast<void*>(a));
  arguments.b.set_data_handle(const_cast<void*>(b));
  arguments.c.set_data_handle(c);
  if (arguments.bias) arguments.bias.set_data_handle(const_cast<float*>(bias));
  arguments.list[DNNL_ARG_SCRATCHPAD] = lane.scratch_memory;
  primitive_.execute(lane.stream, arguments.list);
}

TiledProduct::TiledProduct(ProductContext& context, const ProductShape& shape) : shape_(shape) {
  // Columns first: a tile packs its own columns of b, so cutting rows packs b again. Four tiles at least where the
  // product is worth it, so that two threads stay busy when one of them is held up.
  constexpr std::int64_t kWorthwhile = std::int64_t{1} << 20;  // multiply-adds of a tile
  tile_m_ = piece(shape.m, 1024, 64);
  tile_n_ = piece(shape.n, shape.n >= 2048 ? 512 : 256, 64);
  const auto count = [&](std::int64_t tm, std::int64_t tn) {
    return ((shape.m + tm - 1) / tm) * ((shape.n + tn - 1) / tn);
  };
  while (count(tile_m_, tile_n_) < 4 && tile_m_ * tile_n_ * shape.k >= 2 * kWorthwhile) {
    if (tile_n_ > 192 || tile_m_ <= 64) {
      if (tile_n_ <= 64) break;
      tile_n_ = piece(shape.n, (tile_n_ + 1) / 2, 64);
    } else {
      tile_m_ = piece(shape.m, (tile_m_ + 1) / 2, 32);
    }
  }
  rows_ = (shape.m + tile_m_ - 1) / tile_m_;
  columns_ = (shape.n + tile_n_ - 1) / tile_n_;
  const std::int64_t last_m = shape.m - (rows_ - 1) * tile_m_, last_n = shape.n - (columns_ - 1) * tile_n_;
  const auto kind = [&](std::int64_t m, std::int64_t n) {
    ProductShape tile = shape;
    tile.m = m;
    tile.n = n;
    kinds_.emplace_back(context, tile);
    return static_cast<int>(kinds_.size()) - 1;
  };
  kind(tile_m_, tile_n_);
  if (last_n != tile_n_) right_ = kind(tile_m_, last_n);
  if (last_m != tile_m_) bottom_ = kind(last_m, tile_n_);
  corner_ = last_m == tile_m_ ? right_ : last_n == tile_n_ ? bottom_ : kind(last_m, last_n);
}

void TiledProduct::run(WorkPool& pool, const void* a, const void* b, const float* bias, void* c) const {
  const auto* a_bytes = static_cast<const std::byte*>(a);
  const auto* b_bytes = static_cast<const std::byte*>(b);
  auto* c_bytes = static_cast<std::byte*>(c);
  const auto in = static_cast<std::int64_t>(scalar_bytes(shape_.inputs));
  const auto out = static_cast<std::int64_t>(scalar_bytes(shape_.output));
  pool.run(rows_ * columns_, [&](std::int64_t task, int thread) {
    const std::int64_t i = task % rows_, j = task / rows_;
    const std::int64_t row = i * tile_m_, column = j * tile_n_;
    const bool last_row = i == rows_ - 1, last_column = j == columns_ - 1;
    const int kind = last_row ? (last_column ? corner_ : bottom_) : last_column ? right_ : 0;
    kinds_[static_cast<std::size_t>(kind)].run(thread, a_bytes + in * (shape_.transpose_a ? row : row * shape_.lda),
                                               b_bytes + in * (shape_.transpose_b ? column * shape_.ldb : column),
                                               bias == nullptr ? nullptr : bias + column,
                                               c_bytes + out * (row * shape_.ldc + column));
  });
}

}  // namespace ballast::gpt
