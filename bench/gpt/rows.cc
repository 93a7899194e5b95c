// The row kernels: each is one inlined loop, compiled for three instruction sets by on_isa.
// SPDX-License-Identifier: Apache-2.0
#include "rows.h"

#include <ballast/base/random.h>
#include <dnnl.h>

#include <cmath>
#include <cstring>

#include "simd.h"

namespace ballast::gpt {
namespace {

Isa detect_isa() {
#if defined(__x86_64__)
  const dnnl_cpu_isa_t allowed = dnnl_get_effective_cpu_isa();
  const bool avx512_allowed =
      allowed == dnnl_cpu_isa_all || (allowed & dnnl_cpu_isa_avx512_core) == dnnl_cpu_isa_avx512_core;
  if (avx512_allowed && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return Isa::avx512;
  }
  const bool avx2_allowed = avx512_allowed || (allowed & dnnl_cpu_isa_avx2) == dnnl_cpu_isa_avx2;
  if (avx2_allowed && __builtin_cpu_supports("avx2")) return Isa::avx2;
#endif
  return Isa::baseline;
}

}  // namespace

Isa isa() {
  static const Isa chosen = detect_isa();
  return chosen;
}

namespace rows {
namespace {

using namespace simd;  // NOLINT: the vocabulary of this file

// The lanes of block i of a row of n elements that exist.
BALLAST_GPT_INLINE I16 lane_mask(std::int64_t n) {
  const I16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return lane < static_cast<std::int32_t>(n < kLanes ? n : kLanes);
}

BALLAST_GPT_INLINE F16 load_any(const void* source, DataType type, std::int64_t at, std::int64_t n) {
  if (type == DataType::fp32) return load_n(static_cast<const float*>(source) + at, n);
  const auto* bits = static_cast<const Bf16*>(source) + at;
  if (type == DataType::bf16) return load_n(bits, n);
  Bf16 part[kLanes] = {};
  H16 half;
  if (n >= kLanes) {
    std::memcpy(&half, bits, sizeof half);
  } else {
    for (std::int64_t i = 0; i < n; ++i) part[i] = bits[i];
    std::memcpy(&half, part, sizeof half);
  }
  return widen_half(half);
}

struct ToFloat {
  static BALLAST_GPT_INLINE void run(const void* source, DataType type, std::int64_t first, float* target,
                                     std::int64_t n) {
    for (std::int64_t i = 0; i < n; i += kLanes) store_n(target + i, load_any(source, type, first + i, n - i), n - i);
  }
};

struct FromFloat {
  static BALLAST_GPT_INLINE void run(const float* source, void* target, DataType type, std::int64_t first,
                                     std::int64_t n) {
    if (type == DataType::fp32) {
      std::memcpy(static_cast<float*>(target) + first, source, static_cast<std::size_t>(n) * sizeof(float));
      return;
    }
    Bf16* out = static_cast<Bf16*>(target) + first;
    for (std::int64_t i = 0; i < n; i += kLanes) store_n(out + i, load_n(source + i, n - i), n - i);
  }
};

template <class T>
struct Convert {
  static BALLAST_GPT_INLINE void run(const float* source, T* target, std::int64_t n) {
    for (std::int64_t i = 0; i < n; i += kLanes) store_n(target + i, load_n(source + i, n - i), n - i);
  }
};

struct Embed {
  static BALLAST_GPT_INLINE void run(const std::uint32_t* tokens, const void* wte, DataType wte_type, const void* wpe,
                                     DataType wpe_type, float* x, std::int64_t sequence, std::int64_t width,
                                     std::int64_t first, std::int64_t last) {
    for (std::int64_t t = first; t < last; ++t) {
      for (std::int64_t i = 0; i < width; i += kLanes) {
        store_n(x + t * width + i,
                load_any(wte, wte_type, tokens[t] * width + i, width - i) +
                    load_any(wpe, wpe_type, t % sequence * width + i, width - i),
                width - i);
      }
    }
  }
};

template <class T>
struct LayerNorm {
  static BALLAST_GPT_INLINE void run(NormForward a, T* out, std::int64_t row_count, std::int64_t width) {
    for (std::int64_t r = 0; r < row_count; ++r) {
      const float* x = a.x + r * width;
      F16 total = splat(0);
      if (a.addend != nullptr) {
        float* sum = a.sum + r * width;
        for (std::int64_t i = 0; i < width; i += kLanes) {
          const F16 v = load_n(x + i, width - i) + load_n(a.addend + r * width + i, width - i);
          store_n(sum + i, v, width - i);
          total += v;
        }
        x = sum;
      } else {
        for (std::int64_t i = 0; i < width; i += kLanes) total += load_n(x + i, width - i);
      }
      const float mean = sum_lanes(total) / static_cast<float>(width);
      const F16 centre = splat(mean);
      F16 squares = splat(0);
      for (std::int64_t i = 0; i < width; i += kLanes) {
        const F16 d = select(lane_mask(width - i), load_n(x + i, width - i) - centre, splat(0));
        squares += d * d;
      }
      const float rstd = 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(width) + 1e-5f);
      const F16 scale = splat(rstd);
      for (std::int64_t i = 0; i < width; i += kLanes) {
        const F16 normal = (load_n(x + i, width - i) - centre) * scale;
        store_n(out + r * width + i, normal * load_n(a.weight + i, width - i) + load_n(a.bias + i, width - i),
                width - i);
      }
      a.mean[r] = mean;
      a.rstd[r] = rstd;
    }
  }
};

template <class T>
struct LayerNormBackward {
  static BALLAST_GPT_INLINE void run(NormBackward a, T* narrowed, std::int64_t row_count, std::int64_t width) {
    for (std::int64_t r = 0; r < row_count; ++r) {
      const float* x = a.x + r * width;
      const float* d_out = a.d_out + r * width;
      const F16 mean = splat(a.mean[r]), rstd = splat(a.rstd[r]);
      F16 sum = splat(0), sum_x = splat(0);
      for (std::int64_t i = 0; i < width; i += kLanes) {
        const F16 d = load_n(d_out + i, width - i) * load_n(a.weight + i, width - i);
        sum += d;
        sum_x += d * ((load_n(x + i, width - i) - mean) * rstd);
      }
      const F16 m1 = splat(sum_lanes(sum) / static_cast<float>(width));
      const F16 m2 = splat(sum_lanes(sum_x) / static_cast<float>(width));
      for (std::int64_t i = 0; i < width; i += kLanes) {
        const F16 normal = (load_n(x + i, width - i) - mean) * rstd;
        const F16 d = load_n(d_out + i, width - i) * load_n(a.weight + i, width - i);
        F16 d_x = rstd * ((d - m1) - normal * m2);
        if (a.d_residual != nullptr) d_x += load_n(a.d_residual + r * width + i, width - i);
        store_n(a.d_x + r * width + i, d_x, width - i);
        if (narrowed != nullptr) store_n(narrowed + r * width + i, d_x, width - i);
      }
    }
  }
};

struct LayerNormGradients {
  static BALLAST_GPT_INLINE void run(const float* d_out, const float* x, const float* mean, const float* rstd,
                                     float* d_weight, float* d_bias, std::int64_t row_count, std::int64_t width,
                                     std::int64_t first, std::int64_t last) {
    for (std::int64_t c = first; c < last; c += kLanes) {
      const std::int64_t n = last - c;
      F16 weight = splat(0), bias = splat(0);
      for (std::int64_t r = 0; r < row_count; ++r) {
        const F16 d = load_n(d_out + r * width + c, n);
        weight += d * ((load_n(x + r * width + c, n) - splat(mean[r])) * splat(rstd[r]));
        bias += d;
      }
      store_n(d_weight + c, weight, n);
      store_n(d_bias + c, bias, n);
    }
  }
};

template <class T>
struct ColumnSums {
  static BALLAST_GPT_INLINE void run(const T* m, float* sums, std::int64_t row_count, std::int64_t width,
                                     std::int64_t first, std::int64_t last) {
    std::int64_t c = first;
    for (; c + 4 * kLanes <= last; c += 4 * kLanes) {
      F16 s0 = splat(0), s1 = splat(0), s2 = splat(0), s3 = splat(0);
      for (std::int64_t r = 0; r < row_count; ++r) {
        const T* row = m + r * width + c;
        s0 += load(row);
        s1 += load(row + kLanes);
        s2 += load(row + 2 * kLanes);
        s3 += load(row + 3 * kLanes);
      }
      store(sums + c, s0);
      store(sums + c + kLanes, s1);
      store(sums + c + 2 * kLanes, s2);
      store(sums + c + 3 * kLanes, s3);
    }
    for (; c < last; c += kLanes) {
      F16 s = splat(0);
      for (std::int64_t r = 0; r < row_count; ++r) s += load_n(m + r * width + c, last - c);
      store_n(sums + c, s, last - c);
    }
  }
};

struct Add {
  static BALLAST_GPT_INLINE void run(const float* a, const float* b, float* sum, std::int64_t n) {
    for (std::int64_t i = 0; i < n; i += kLanes) store_n(sum + i, load_n(a + i, n - i) + load_n(b + i, n - i), n - i);
  }
};

// sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x^3)
BALLAST_GPT_INLINE F16 gelu_gate(F16 x) {
  const F16 twice_u = splat(1.5957691216f) * (x + splat(0.044715f) * (x * x * x));
  return splat(1.0f) / (splat(1.0f) + exponential(-twice_u));
}

template <class T>
struct Gelu {
  static BALLAST_GPT_INLINE void run(const T* x, T* out, std::int64_t n) {
    for (std::int64_t i = 0; i < n; i += kLanes) {
      const F16 v = load_n(x + i, n - i);
      store_n(out + i, v * gelu_gate(v), n - i);
    }
  }
};

template <class T>
struct GeluBackward {
  static BALLAST_GPT_INLINE void run(const T* x, T* gradient, std::int64_t n) {
    for (std::int64_t i = 0; i < n; i += kLanes) {
      const F16 v = load_n(x + i, n - i);
      const F16 gate = gelu_gate(v);
      const F16 slope = splat(1.5957691216f) * (splat(1.0f) + splat(3 * 0.044715f) * (v * v));
      const F16 derivative = gate + v * (gate * (splat(1.0f) - gate)) * slope;
      store_n(gradient + i, load_n(gradient + i, n - i) * derivative, n - i);
    }
  }
};

template <class T>
struct CausalSoftmax {
  static BALLAST_GPT_INLINE void run(float* scores, T* probabilities, std::int64_t row_count, std::int64_t columns,
                                     std::int64_t causal_first, float scale) {
    const F16 lowest = splat(-3.0e38f);
    for (std::int64_t r = 0; r < row_count; ++r) {
      float* s = scores + r * columns;
      T* p = probabilities + r * columns;
      const std::int64_t n = causal_first + r + 1;
      F16 top = lowest;
      for (std::int64_t i = 0; i < n; i += kLanes) {
        top = maximum(select(lane_mask(n - i), load_n(s + i, columns - i), lowest), top);
      }
      const F16 shift = splat(max_lanes(top) * scale), factor = splat(scale);
      F16 sum = splat(0);
      for (std::int64_t i = 0; i < n; i += kLanes) {
        const F16 e = select(lane_mask(n - i), exponential(load_n(s + i, columns - i) * factor - shift), splat(0));
        store_n(s + i, e, columns - i);
        sum += e;
      }
      const F16 inverse = splat(1.0f / sum_lanes(sum));
      for (std::int64_t i = 0; i < columns; i += kLanes) {
        store_n(p + i, i < n ? load_n(s + i, columns - i) * inverse : splat(0), columns - i);
      }
    }
  }
};

template <class T>
struct CausalSoftmaxBackward {
  static BALLAST_GPT_INLINE void run(const T* probabilities, const float* d_probabilities, T* d_scores,
                                     std::int64_t row_count, std::int64_t columns, std::int64_t causal_first,
                                     float scale) {
    for (std::int64_t r = 0; r < row_count; ++r) {
      const T* p = probabilities + r * columns;
      const float* d = d_probabilities + r * columns;
      const std::int64_t n = causal_first + r + 1;
      F16 sum = splat(0);
      for (std::int64_t i = 0; i < n; i += kLanes) {
        sum += select(lane_mask(n - i), load_n(p + i, columns - i) * load_n(d + i, columns - i), splat(0));
      }
      const F16 dot = splat(sum_lanes(sum)), factor = splat(scale);
      for (std::int64_t i = 0; i < columns; i += kLanes) {
        F16 value = splat(0);
        if (i < n) {
          const F16 g = load_n(p + i, columns - i) * (load_n(d + i, columns - i) - dot) * factor;
          value = select(lane_mask(n - i), g, splat(0));
        }
        store_n(d_scores + r * columns + i, value, columns - i);
      }
    }
  }
};

template <class T>
struct CrossEntropy {
  static BALLAST_GPT_INLINE void run(float* logits, std::int64_t stride, const std::uint32_t* targets, double* losses,
                                     T* d_logits, std::int64_t d_stride, float gradient_scale, std::int64_t row_count,
                                     std::int64_t vocabulary) {
    for (std::int64_t r = 0; r < row_count; ++r) {
      float* z = logits + r * stride;
      F16 top = splat(-3.0e38f);
      for (std::int64_t i = 0; i < vocabulary; i += kLanes) {
        top = maximum(select(lane_mask(vocabulary - i), load_n(z + i, vocabulary - i), splat(-3.0e38f)), top);
      }
      const float highest = max_lanes(top);
      const float of_target = z[targets[r]];
      const F16 shift = splat(highest);
      F16 sums = splat(0);
      for (std::int64_t i = 0; i < vocabulary; i += kLanes) {
        const F16 e = select(lane_mask(vocabulary - i), exponential(load_n(z + i, vocabulary - i) - shift), splat(0));
        store_n(z + i, e, vocabulary - i);
        sums += e;
      }
      const float sum = sum_lanes(sums);
      losses[r] = std::log(static_cast<double>(sum)) + (static_cast<double>(highest) - static_cast<double>(of_target));
      if (d_logits == nullptr) continue;
      T* d = d_logits + r * d_stride;
      const float factor = gradient_scale / sum;
      for (std::int64_t i = 0; i < vocabulary; i += kLanes) {
        store_n(d + i, load_n(z + i, vocabulary - i) * splat(factor), vocabulary - i);
      }
      const std::int64_t target = targets[r], block = target / kLanes * kLanes, n = vocabulary - block;
      float lanes[kLanes];
      store(lanes, load_n(z + block, n) * splat(factor));
      lanes[target - block] = lanes[target - block] - gradient_scale;
      store_n(d + block, load(lanes), n);
    }
  }
};

struct GatherSum {
  static BALLAST_GPT_INLINE void run(const float* x, const std::int32_t* indices, std::int64_t count, float* out,
                                     std::int64_t width) {
    for (std::int64_t i = 0; i < width; i += kLanes) {
      F16 sum = splat(0);
      for (std::int64_t k = 0; k < count; ++k) sum += load_n(x + indices[k] * width + i, width - i);
      store_n(out + i, sum, width - i);
    }
  }
};

// ln x for x in (0, 1], within 2 ulp.
BALLAST_GPT_INLINE F16 logarithm(F16 x) {
  I16 bits = (I16)x;
  I16 exponent = (bits >> 23) - 126;
  F16 m = (F16)((bits & 0x007FFFFF) | 0x3F000000);  // in [0.5, 1)
  const I16 small = m < splat(0.707106781f);
  exponent = exponent + small;  // a true mask is -1
  m = select(small, m + m, m) - splat(1.0f);
  const F16 e = __builtin_convertvector(exponent, F16);
  const F16 z = m * m;
  F16 p = splat(7.0376836292e-2f);
  p = p * m + splat(-1.1514610310e-1f);
  p = p * m + splat(1.1676998740e-1f);
  p = p * m + splat(-1.2420140846e-1f);
  p = p * m + splat(1.4249322787e-1f);
  p = p * m + splat(-1.6668057665e-1f);
  p = p * m + splat(2.0000714765e-1f);
  p = p * m + splat(-2.4999993993e-1f);
  p = p * m + splat(3.3333331174e-1f);
  p = p * (m * z) + e * splat(-2.12194440e-4f);
  p = p - splat(0.5f) * z;
  return (m + p) + e * splat(0.693359375f);
}

// cos(2 pi t) for t in [-1/2, 1/2]: the Taylor series to t^20.
BALLAST_GPT_INLINE F16 cosine_turns(F16 t) {
  const F16 y = t * t * splat(39.4784176044f);
  F16 p = splat(4.1103176233e-19f);  // 1/20!
  p = p * y + splat(-1.5619206968e-16f);
  p = p * y + splat(4.7794773324e-14f);
  p = p * y + splat(-1.1470745598e-11f);
  p = p * y + splat(2.0876756988e-9f);
  p = p * y + splat(-2.7557319224e-7f);
  p = p * y + splat(2.4801587302e-5f);
  p = p * y + splat(-1.3888888889e-3f);
  p = p * y + splat(4.1666666667e-2f);
  p = p * y + splat(-0.5f);
  return p * y + splat(1.0f);
}

struct FillNormal {
  static BALLAST_GPT_INLINE void run(std::uint64_t key, std::int64_t first, float* values, std::int64_t n,
                                     float deviation) {
    for (std::int64_t i = 0; i < n; i += kLanes) {
      float radius_bits[kLanes], angle_bits[kLanes];
      for (std::int64_t l = 0; l < kLanes; ++l) {
        const std::uint64_t bits = base::random_at(key, static_cast<std::uint64_t>(first + i + l));
        radius_bits[l] = static_cast<float>(static_cast<std::int32_t>(bits >> 40) + 1);
        angle_bits[l] = static_cast<float>(static_cast<std::int32_t>((bits >> 16) & 0xFFFFFF));
      }
      float squares[kLanes];
      store(squares, splat(-2.0f) * logarithm(load(radius_bits) * splat(0x1p-24f)));
      for (float& square : squares) square = std::sqrt(square > 0 ? square : 0.0f);
      const F16 turn = load(angle_bits) * splat(0x1p-24f) - splat(0.5f);
      store_n(values + i, load(squares) * cosine_turns(turn) * splat(deviation), n - i);
    }
  }
};

}  // namespace

void to_float(const void* source, DataType type, std::int64_t first, float* target, std::int64_t elements) {
  on_isa<ToFloat>(source, type, first, target, elements);
}
void from_float(const float* source, void* target, DataType type, std::int64_t first, std::int64_t elements) {
  on_isa<FromFloat>(source, target, type, first, elements);
}
template <class T>
void convert(const float* source, T* target, std::int64_t elements) {
  on_isa<Convert<T>>(source, target, elements);
}
void embed(const std::uint32_t* tokens, const void* wte, DataType wte_type, const void* wpe, DataType wpe_type,
           float* x, std::int64_t sequence, std::int64_t width, std::int64_t first, std::int64_t last) {
  on_isa<Embed>(tokens, wte, wte_type, wpe, wpe_type, x, sequence, width, first, last);
}
template <class T>
void layer_norm(const NormForward& a, T* out, std::int64_t row_count, std::int64_t width) {
  on_isa<LayerNorm<T>>(a, out, row_count, width);
}
template <class T>
void layer_norm_backward(const NormBackward& a, T* narrowed, std::int64_t row_count, std::int64_t width) {
  on_isa<LayerNormBackward<T>>(a, narrowed, row_count, width);
}
void layer_norm_gradients(const float* d_out, const float* x, const float* mean, const float* rstd, float* d_weight,
                          float* d_bias, std::int64_t row_count, std::int64_t width, std::int64_t first,
                          std::int64_t last) {
  on_isa<LayerNormGradients>(d_out, x, mean, rstd, d_weight, d_bias, row_count, width, first, last);
}
template <class T>
void column_sums(const T* m, float* sums, std::int64_t row_count, std::int64_t width, std::int64_t first,
                 std::int64_t last) {
  on_isa<ColumnSums<T>>(m, sums, row_count, width, first, last);
}
void add(const float* a, const float* b, float* sum, std::int64_t elements) { on_isa<Add>(a, b, sum, elements); }
template <class T>
void gelu(const T* x, T* out, std::int64_t elements) {
  on_isa<Gelu<T>>(x, out, elements);
}
template <class T>
void gelu_backward(const T* x, T* gradient, std::int64_t elements) {
  on_isa<GeluBackward<T>>(x, gradient, elements);
}
template <class T>
void causal_softmax(float* scores, T* probabilities, std::int64_t row_count, std::int64_t columns,
                    std::int64_t causal_first, float scale) {
  on_isa<CausalSoftmax<T>>(scores, probabilities, row_count, columns, causal_first, scale);
}
template <class T>
void causal_softmax_backward(const T* probabilities, const float* d_probabilities, T* d_scores, std::int64_t row_count,
                             std::int64_t columns, std::int64_t causal_first, float scale) {
  on_isa<CausalSoftmaxBackward<T>>(probabilities, d_probabilities, d_scores, row_count, columns, causal_first, scale);
}
template <class T>
void cross_entropy(float* logits, std::int64_t stride, const std::uint32_t* targets, double* losses, T* d_logits,
                   std::int64_t d_stride, float gradient_scale, std::int64_t row_count, std::int64_t vocabulary) {
  on_isa<CrossEntropy<T>>(logits, stride, targets, losses, d_logits, d_stride, gradient_scale, row_count, vocabulary);
}
void gather_sum(const float* x, const std::int32_t* indices, std::int64_t count, float* out, std::int64_t width) {
  on_isa<GatherSum>(x, indices, count, out, width);
}
void fill_normal(std::uint64_t key, std::int64_t first, float* values, std::int64_t elements, float deviation) {
  on_isa<FillNormal>(key, first, values, elements, deviation);
}

#define BALLAST_GPT_INSTANTIATE(T)                                                                               \
  template void convert<T>(const float*, T*, std::int64_t);                                                      \
  template void layer_norm<T>(const NormForward&, T*, std::int64_t, std::int64_t);                               \
  template void layer_norm_backward<T>(const NormBackward&, T*, std::int64_t, std::int64_t);                     \
  template void column_sums<T>(const T*, float*, std::int64_t, std::int64_t, std::int64_t, std::int64_t);        \
  template void gelu<T>(const T*, T*, std::int64_t);                                                             \
  template void gelu_backward<T>(const T*, T*, std::int64_t);                                                    \
  template void causal_softmax<T>(float*, T*, std::int64_t, std::int64_t, std::int64_t, float);                  \
  template void causal_softmax_backward<T>(const T*, const float*, T*, std::int64_t, std::int64_t, std::int64_t, \
                                           float);                                                               \
  template void cross_entropy<T>(float*, std::int64_t, const std::uint32_t*, double*, T*, std::int64_t, float,   \
                                 std::int64_t, std::int64_t);
BALLAST_GPT_INSTANTIATE(float)
BALLAST_GPT_INSTANTIATE(Bf16)
#undef BALLAST_GPT_INSTANTIATE

}  // namespace rows
}  // namespace ballast::gpt
