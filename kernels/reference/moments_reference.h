// The maps of 8-bit moments in double, from their description, and the nearest entry by looking at all of them: what
// the kernels' results are compared with.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "ballast/kernels/moments.h"

namespace ballast::kernels::reference {

// As create_dynamic_map of bitsandbytes (functional.py) makes it, with 7 exponent bits of 8: for each exponent the
// means of neighbours among evenly spaced points from 0.1 to 1, then 0 and 1, sorted. Rounded to fp32 once.
inline std::vector<float> dynamic_map(Moment moment) {
  const bool is_signed = moment == Moment::exp_avg;
  std::vector<float> map = {0.0F, 1.0F};
  for (int i = 0; i < 7; ++i) {
    const int points = (1 << (is_signed ? i : i + 1)) + 1;
    for (int j = 0; j + 1 < points; ++j) {
      const double left = 0.1 + 0.9 * j / (points - 1);
      const double right = 0.1 + 0.9 * (j + 1) / (points - 1);
      const double mean = std::pow(10.0, i - 6) * (left + right) / 2;
      map.push_back(static_cast<float>(mean));
      if (is_signed) map.push_back(static_cast<float>(-mean));
    }
  }
  std::sort(map.begin(), map.end());
  return map;
}

// A block's values as they are read again.
inline std::vector<float> stored(Moment moment, const std::vector<float>& values) {
  const std::vector<float> map = dynamic_map(moment);
  float scale = 0.0F;
  for (const float value : values) {
    if (!std::isfinite(value)) return std::vector<float>(values.size(), NAN);
    if (std::abs(value) > std::abs(scale) || (std::abs(value) == std::abs(scale) && value > 0.0F)) scale = value;
  }
  std::vector<float> result;
  for (const float value : values) {
    const float share = scale == 0.0F ? 0.0F : value / scale;
    float nearest = map.front();
    for (const float entry : map) {
      if (moment == Moment::exp_avg_sq && value != 0.0F && entry == 0.0F) continue;
      const double distance = std::abs(double{entry} - double{share});
      const double least = std::abs(double{nearest} - double{share});
      if (distance < least || (distance == least && std::abs(entry) < std::abs(nearest)) ||
          (nearest == 0.0F && moment == Moment::exp_avg_sq && value != 0.0F)) {
        nearest = entry;
      }
    }
    result.push_back(nearest * scale);
  }
  return result;
}

}  // namespace ballast::kernels::reference
