// One element of Adam and AdamW in double, from the fp32 scalars: what the kernels' results are compared with.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>

#include "ballast/kernels/adam.h"

namespace ballast::kernels::reference {

// A value of a formula, and the largest magnitude among its summands: the measure of the rounding it may carry.
struct Term {
  double value;
  double largest;
};

inline double largest_of(std::initializer_list<double> summands) {
  double largest = 0.0;
  for (const double summand : summands) largest = std::max(largest, std::abs(summand));
  return largest;
}

// The distance of neighbouring fp32 numbers at a magnitude.
inline double ulp_fp32(double magnitude) {
  constexpr double kSmallest = std::numeric_limits<float>::denorm_min();
  if (magnitude == 0.0) return kSmallest;
  return std::max(kSmallest, std::ldexp(1.0, std::ilogb(magnitude) - 23));
}

// The distance of neighbouring bf16 numbers at a magnitude.
inline double ulp_bf16(double magnitude) {
  if (magnitude == 0.0) return std::ldexp(1.0, -133);
  return std::max(std::ldexp(1.0, -133), std::ldexp(1.0, std::ilogb(magnitude) - 7));
}

inline double scaled_gradient(const AdamScalars& s, double p, double gradient) {
  return gradient * s.gradient_scale + s.l2_decay * p;
}

inline Term exp_avg(const AdamScalars& s, double p, double m, double gradient) {
  const double kept = s.beta1 * m;
  const double added = s.one_minus_beta1 * scaled_gradient(s, p, gradient);
  return {kept + added, largest_of({kept, added})};
}

inline Term exp_avg_sq(const AdamScalars& s, double p, double v, double gradient) {
  const double g = scaled_gradient(s, p, gradient);
  const double kept = s.beta2 * v;
  const double added = s.one_minus_beta2 * (g * g);
  return {kept + added, largest_of({kept, added})};
}

// From the m and v that were stored.
inline Term parameter(const AdamScalars& s, double p, double stored_m, double stored_v) {
  const double kept = p * s.decay_factor;
  const double step = s.step_size * stored_m;
  if (step == 0.0) return {kept, std::abs(kept)};
  const double change = step / (std::sqrt(stored_v) * s.inverse_sqrt_correction2 + s.epsilon);
  return {kept - change, largest_of({kept, change})};
}

}  // namespace ballast::kernels::reference
