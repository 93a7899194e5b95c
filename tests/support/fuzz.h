// How long fuzzing tests go on: a short while in a test run; as many inputs as BALLAST_FUZZ_ROUNDS says, or for as long
// as BALLAST_FUZZ_SECONDS says.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace ballast::test {

// Asked before each round, from 0.
inline bool fuzz_goes_on(std::uint64_t round, std::uint64_t usual_rounds) {
  static std::chrono::steady_clock::time_point begin;
  if (round == 0) begin = std::chrono::steady_clock::now();
  if (const char* const seconds = std::getenv("BALLAST_FUZZ_SECONDS")) {
    if (std::chrono::steady_clock::now() - begin < std::chrono::seconds(std::strtoull(seconds, nullptr, 10)))
      return true;
    std::printf("%llu inputs\n", static_cast<unsigned long long>(round));
    return false;
  }
  const char* const rounds = std::getenv("BALLAST_FUZZ_ROUNDS");
  return round < (rounds == nullptr ? usual_rounds : std::strtoull(rounds, nullptr, 10));
}

}  // namespace ballast::test
