// Adam over eight elements at a time: one body for the device and for the host (where the tests run it), with the
// operations of kernels/src/cpu/adam.cc in their order. Contraction is off on both sides.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/kernels/adam.h>
#include <ballast/kernels/cuda.h>

#include <cstdint>
#include <type_traits>

#include "numbers.h"

namespace ballast::kernels::cuda {

constexpr unsigned kVector = 8;  // elements per item: 16 bytes of bf16, 32 of fp32

template <class T>
struct alignas(16) Eight {
  T v[kVector];
};

template <class T>
BALLAST_HOST_DEVICE Eight<T> load_eight(const T* source) {
  return *reinterpret_cast<const Eight<T>*>(source);
}
template <class T>
BALLAST_HOST_DEVICE void store_eight(const Eight<T>& value, T* destination) {
  *reinterpret_cast<Eight<T>*>(destination) = value;
}

template <bool kL2, class Moment>
BALLAST_HOST_DEVICE void adam_step(const AdamScalars& s, float g, float& p, Moment& m_stored, Moment& v_stored) {
  float m = loaded(m_stored);
  float v = loaded(v_stored);
  if (kL2) {
    // In double, where the products are exact, and rounded once: the terms may cancel.
    g = static_cast<float>(static_cast<double>(g) * static_cast<double>(s.gradient_scale) +
                           static_cast<double>(p) * static_cast<double>(s.l2_decay));
  } else {
    g = g * s.gradient_scale;
  }
  p = p * s.decay_factor;
  keep(s.beta1 * m + s.one_minus_beta1 * g, m_stored);
  keep(s.beta2 * v + s.one_minus_beta2 * (g * g), v_stored);
  m = loaded(m_stored);
  v = loaded(v_stored);
  const float change = s.step_size * m;
  const float denominator = sqrtf(v) * s.inverse_sqrt_correction2 + s.epsilon;
  // A change of zero keeps p's bits, and makes 0 / 0 no step.
  if (!(change == 0.0f)) p = p - change / denominator;
}

// Segments per launch: they travel with its arguments, of which there may be 4 KiB.
constexpr unsigned kSegmentsPerLaunch = 48;

template <ParameterFormat kFormat, ElementType kMoment, ElementType kGradient, bool kL2>
struct AdamBody {
  using Parameter = std::conditional_t<kFormat == ParameterFormat::fp32, float, std::uint16_t>;
  using Master = std::conditional_t<kFormat == ParameterFormat::fp16, float, std::uint16_t>;
  using Moment = std::conditional_t<kMoment == ElementType::fp32, float, std::uint16_t>;
  using Gradient = std::conditional_t<kGradient == ElementType::fp32, float, std::uint16_t>;

  Parameter* parameter;
  Master* master;
  Moment* exp_avg;
  Moment* exp_avg_sq;
  const Gradient* gradient;
  Parameter* published;
  std::uint64_t origin;  // the element at which item 0 begins, a multiple of kVector
  bool aligned;          // every array, to 16 bytes
  unsigned segment_count;
  AdamSegment segments[kSegmentsPerLaunch];

  // For launches that run on the host, which see device memory elsewhere.
  template <class Visit>
  void visit_pointers(const Visit& visit) {
    visit(parameter);
    visit(master);
    visit(exp_avg);
    visit(exp_avg_sq);
    visit(gradient);
    visit(published);
  }

  BALLAST_HOST_DEVICE void update(const AdamScalars& s, float g, Parameter& p_stored, Master& master_stored,
                                  Moment& m_stored, Moment& v_stored) const {
    float p;
    if constexpr (kFormat == ParameterFormat::split_bf16) {
      p = merge(p_stored, master_stored);
    } else if constexpr (kFormat == ParameterFormat::fp16) {
      p = master_stored;
    } else {
      p = p_stored;
    }
    adam_step<kL2>(s, g, p, m_stored, v_stored);
    if constexpr (kFormat == ParameterFormat::split_bf16) {
      split(p, p_stored, master_stored);
    } else if constexpr (kFormat == ParameterFormat::fp16) {
      master_stored = p;
      p_stored = fp16_rounded(p);
    } else {
      p_stored = p;
    }
  }

  BALLAST_HOST_DEVICE void update_eight(const AdamScalars& s, std::uint64_t i) const {
    Eight<Parameter> p = load_eight(parameter + i);
    Eight<Master> low{};
    if constexpr (kFormat != ParameterFormat::fp32) low = load_eight(master + i);
    Eight<Moment> m = load_eight(exp_avg + i);
    Eight<Moment> v = load_eight(exp_avg_sq + i);
    const Eight<Gradient> g = load_eight(gradient + i);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (unsigned k = 0; k < kVector; ++k) update(s, loaded(g.v[k]), p.v[k], low.v[k], m.v[k], v.v[k]);
    store_eight(p, parameter + i);
    if constexpr (kFormat != ParameterFormat::fp32) store_eight(low, master + i);
    store_eight(m, exp_avg + i);
    store_eight(v, exp_avg_sq + i);
    if (published != nullptr) store_eight(p, published + i);
  }

  BALLAST_HOST_DEVICE void update_one(const AdamScalars& s, std::uint64_t i) const {
    Master none{};
    if constexpr (kFormat == ParameterFormat::fp32) {
      update(s, loaded(gradient[i]), parameter[i], none, exp_avg[i], exp_avg_sq[i]);
    } else {
      update(s, loaded(gradient[i]), parameter[i], master[i], exp_avg[i], exp_avg_sq[i]);
    }
    if (published != nullptr) published[i] = parameter[i];
  }

  BALLAST_HOST_DEVICE void operator()(std::uint64_t item) const {
    const std::uint64_t begin = origin + item * kVector;
    const std::uint64_t end = begin + kVector;
    // The first segment that ends after `begin`.
    unsigned low = 0;
    unsigned high = segment_count;
    while (low < high) {
      const unsigned middle = (low + high) / 2;
      if (segments[middle].begin + segments[middle].count <= begin) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    for (; low < segment_count && segments[low].begin < end; ++low) {
      const AdamSegment& segment = segments[low];
      const std::uint64_t segment_end = segment.begin + segment.count;
      if (aligned && segment.begin <= begin && end <= segment_end) {
        update_eight(segment.scalars, begin);
        return;
      }
      std::uint64_t i = segment.begin > begin ? segment.begin : begin;
      const std::uint64_t last = segment_end < end ? segment_end : end;
      for (; i < last; ++i) update_one(segment.scalars, i);
    }
  }
};

}  // namespace ballast::kernels::cuda
