// BALLAST_CHECK: conditions that only a bug can break. On in every build; prints the place and aborts, because going on
// would write wrong numbers.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <cstdlib>

namespace ballast::base {

[[noreturn]] inline void check_failed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "ballast: internal error: %s does not hold at %s:%d\n", condition, file, line);
  std::abort();
}

}  // namespace ballast::base

#define BALLAST_CHECK(condition) \
  (static_cast<bool>(condition) ? void(0) : ::ballast::base::check_failed(#condition, __FILE__, __LINE__))
