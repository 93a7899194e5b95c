// Accumulation, sums of squares, casts, the finite check and fill: bodies for the device and for the host.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/kernels/reduce.h>

#include <cstdint>

#include "adam_body.h"

namespace ballast::kernels::cuda {

// Items of kVector elements over arrays of `count`; whole and aligned ones with 16-byte accesses.
template <class Operation>
struct ArrayBody {
  Operation operation;
  std::uint64_t count;
  bool aligned;

  template <class Visit>
  void visit_pointers(const Visit& visit) {
    operation.visit_pointers(visit);
  }

  BALLAST_HOST_DEVICE void operator()(std::uint64_t item) const {
    const std::uint64_t begin = item * kVector;
    if (aligned && begin + kVector <= count) {
      operation.eight(begin);
      return;
    }
    const std::uint64_t end = begin + kVector < count ? begin + kVector : count;
    for (std::uint64_t i = begin; i < end; ++i) operation.one(i);
  }
};

// destination[i] = f(destination[i], source[i]).
template <class To, class From, class Function>
struct Combine {
  To* destination;
  const From* source;
  Function function;

  template <class Visit>
  void visit_pointers(const Visit& visit) {
    visit(destination);
    visit(source);
  }
  BALLAST_HOST_DEVICE void one(std::uint64_t i) const { function(destination[i], source[i]); }
  BALLAST_HOST_DEVICE void eight(std::uint64_t i) const {
    Eight<To> to{};
    if constexpr (Function::kReadsDestination) to = load_eight(destination + i);
    const Eight<From> from = load_eight(source + i);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (unsigned k = 0; k < kVector; ++k) function(to.v[k], from.v[k]);
    store_eight(to, destination + i);
  }
};

struct AddScaled {
  static constexpr bool kReadsDestination = true;
  float scale;
  template <class T>
  BALLAST_HOST_DEVICE void operator()(T& to, const T& from) const {
    keep(loaded(to) + scale * loaded(from), to);
  }
};
struct ToBf16 {
  static constexpr bool kReadsDestination = false;
  BALLAST_HOST_DEVICE void operator()(std::uint16_t& to, float from) const { to = bf16_rounded(from); }
};
struct FromBf16 {
  static constexpr bool kReadsDestination = false;
  BALLAST_HOST_DEVICE void operator()(float& to, std::uint16_t from) const { to = bf16_value(from); }
};
struct ToFp16 {
  static constexpr bool kReadsDestination = false;
  BALLAST_HOST_DEVICE void operator()(std::uint16_t& to, float from) const { to = fp16_rounded(from); }
};
struct FromFp16 {
  static constexpr bool kReadsDestination = false;
  BALLAST_HOST_DEVICE void operator()(float& to, std::uint16_t from) const { to = fp16_value(from); }
};

struct Split {
  const float* source;
  std::uint16_t* parameter;
  std::uint16_t* remainder;

  template <class Visit>
  void visit_pointers(const Visit& visit) {
    visit(source);
    visit(parameter);
    visit(remainder);
  }
  BALLAST_HOST_DEVICE void one(std::uint64_t i) const { split(source[i], parameter[i], remainder[i]); }
  BALLAST_HOST_DEVICE void eight(std::uint64_t i) const {
    const Eight<float> from = load_eight(source + i);
    Eight<std::uint16_t> upper, lower;
    for (unsigned k = 0; k < kVector; ++k) split(from.v[k], upper.v[k], lower.v[k]);
    store_eight(upper, parameter + i);
    store_eight(lower, remainder + i);
  }
};

struct Merge {
  const std::uint16_t* parameter;
  const std::uint16_t* remainder;
  float* destination;

  template <class Visit>
  void visit_pointers(const Visit& visit) {
    visit(parameter);
    visit(remainder);
    visit(destination);
  }
  BALLAST_HOST_DEVICE void one(std::uint64_t i) const { destination[i] = merge(parameter[i], remainder[i]); }
  BALLAST_HOST_DEVICE void eight(std::uint64_t i) const {
    const Eight<std::uint16_t> upper = load_eight(parameter + i);
    const Eight<std::uint16_t> lower = load_eight(remainder + i);
    Eight<float> to;
    for (unsigned k = 0; k < kVector; ++k) to.v[k] = merge(upper.v[k], lower.v[k]);
    store_eight(to, destination + i);
  }
};

template <class T>
struct Fill {
  T* destination;
  T value;

  template <class Visit>
  void visit_pointers(const Visit& visit) {
    visit(destination);
  }
  BALLAST_HOST_DEVICE void one(std::uint64_t i) const { destination[i] = value; }
  BALLAST_HOST_DEVICE void eight(std::uint64_t i) const {
    Eight<T> all;
    for (unsigned k = 0; k < kVector; ++k) all.v[k] = value;
    store_eight(all, destination + i);
  }
};

template <class T>
struct FindNonFinite {
  const T* source;
  std::uint32_t* not_finite;

  template <class Visit>
  void visit_pointers(const Visit& visit) {
    visit(source);
    visit(not_finite);
  }
  // Every finder stores the same value: which one comes last makes no difference.
  BALLAST_HOST_DEVICE void look(T stored) const {
    if ((bits_of(loaded(stored)) & 0x7F800000u) == 0x7F800000u) *not_finite = 1;
  }
  BALLAST_HOST_DEVICE void one(std::uint64_t i) const { look(source[i]); }
  BALLAST_HOST_DEVICE void eight(std::uint64_t i) const {
    const Eight<T> from = load_eight(source + i);
    for (unsigned k = 0; k < kVector; ++k) look(from.v[k]);
  }
};

// One warp sums one block of kSumBlock elements: its lane l the squares of elements l, l + 32, … in their order, the
// lanes then added as a tree by the launch, which halves their number each time.
constexpr unsigned kWarp = 32;
template <class T>
struct SumSquares {
  const T* source;
  std::uint64_t count;
  double* block_sums;

  template <class Visit>
  void visit_pointers(const Visit& visit) {
    visit(source);
    visit(block_sums);
  }
  BALLAST_HOST_DEVICE double lane(std::uint64_t block, unsigned lane) const {
    const std::uint64_t begin = block * kSumBlock;
    const std::uint64_t end = begin + kSumBlock < count ? begin + kSumBlock : count;
    double sum = 0;
#ifdef __CUDA_ARCH__
#pragma unroll 8
#endif
    for (std::uint64_t i = begin + lane; i < end; i += kWarp) {
      const double value = static_cast<double>(loaded(source[i]));
      sum += value * value;
    }
    return sum;
  }
  BALLAST_HOST_DEVICE void finish(std::uint64_t block, double sum) const { block_sums[block] = sum; }
};

}  // namespace ballast::kernels::cuda
