// What every closed form asks of its inputs.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/error.h>

#include <cmath>
#include <string>

namespace ballast::planner {

// Infinity is a number here ("very many ranks"); NaN is none.
inline void require_positive(double value, const char* what) {
  if (!(value > 0)) throw ConfigError(std::string(what) + " is " + std::to_string(value) + "; it must be above 0");
}
inline void require_not_negative(double value, const char* what) {
  if (!(value >= 0)) throw ConfigError(std::string(what) + " is " + std::to_string(value) + "; it must be 0 or more");
}
inline void require_stage(int stage) {
  if (stage < 0 || stage > 3) throw ConfigError("ZeRO stage " + std::to_string(stage) + " is none of 0 to 3");
}

}  // namespace ballast::planner
