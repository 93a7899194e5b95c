// How long fuzzing tests go on: a short while in a test run, as long as asked for by BALLAST_FUZZ_ROUNDS.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdlib>

namespace ballast::test {

inline std::uint64_t fuzz_rounds(std::uint64_t usual) {
  const char* const text = std::getenv("BALLAST_FUZZ_ROUNDS");
  return text == nullptr ? usual : std::strtoull(text, nullptr, 10);
}

}  // namespace ballast::test
