// A counter-based generator: value n of stream `seed` is a pure function of both, the same on every compiler and at any
// order of evaluation. The mixing constants are those of SplitMix64 (Steele, Lea, Flood 2014).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ballast::base {

constexpr std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// The counter-th 64-bit value of the stream.
constexpr std::uint64_t random_at(std::uint64_t seed, std::uint64_t counter) {
  return mix(mix(seed) ^ mix(counter * 2 + 1));
}

// A sequential view of one stream.
class Random {
 public:
  explicit constexpr Random(std::uint64_t seed) : seed_(seed) {}
  constexpr std::uint64_t next() { return random_at(seed_, counter_++); }
  // Uniform in [0, bound); bound > 0. The bias is below 2^-32 for bounds below 2^32.
  constexpr std::uint64_t below(std::uint64_t bound) { return next() % bound; }
  constexpr double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }

 private:
  std::uint64_t seed_;
  std::uint64_t counter_ = 0;
};

}  // namespace ballast::base
