// Sizes in bytes as people write them ("512MiB", "2GB"), and rounding.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace ballast::base {

constexpr std::uint64_t kKiB = std::uint64_t{1} << 10;
constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
constexpr std::uint64_t round_down(std::uint64_t value, std::uint64_t multiple) { return value / multiple * multiple; }
constexpr std::uint64_t ceil_div(std::uint64_t value, std::uint64_t divisor) { return (value + divisor - 1) / divisor; }

// A non-negative decimal number (a fraction is allowed where the result is a whole number of bytes) and a unit:
// B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024). Nothing where the text is anything else, a
// bare number included, or does not fit 63 bits.
std::optional<std::uint64_t> parse_size(std::string_view text);

// "1.50 GiB", "317 KiB", "12 B": for people.
std::string format_size(std::uint64_t bytes);

}  // namespace ballast::base
