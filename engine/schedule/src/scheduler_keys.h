// How jobs are ordered, and small helpers that the scheduler's sources share.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ballast::schedule {

// Keys of jobs: the place of their entry (or of their queueing) in program order, then the chunk.
constexpr int kChunkBits = 24;

// Smallest first, for the standard heap functions (which keep the largest in front).
constexpr auto kLater = [](const auto& a, const auto& b) { return a > b; };

constexpr bool overlap(std::uint64_t a, std::uint64_t a_bytes, std::uint64_t b, std::uint64_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

}  // namespace ballast::schedule
