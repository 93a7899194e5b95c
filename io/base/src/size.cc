// Parsing and printing of sizes in bytes.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/size.h>

#include <array>
#include <cmath>
#include <cstdio>

namespace ballast::base {

std::optional<std::uint64_t> parse_size(std::string_view text) {
  struct Unit {
    std::string_view name;
    std::uint64_t bytes;
  };
  constexpr std::array<Unit, 9> units = {{{"B", 1},
                                          {"KB", 1'000},
                                          {"MB", 1'000'000},
                                          {"GB", 1'000'000'000},
                                          {"TB", 1'000'000'000'000},
                                          {"KiB", kKiB},
                                          {"MiB", kMiB},
                                          {"GiB", kGiB},
                                          {"TiB", kGiB << 10}}};
  // Digits, optionally a point and at most nine more digits: exact in integers.
  unsigned __int128 mantissa = 0;
  std::uint64_t scale = 1;
  std::size_t i = 0;
  std::size_t digits = 0;
  bool point = false;
  for (; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '.' && !point && digits > 0) {
      point = true;
      continue;
    }
    if (c < '0' || c > '9') break;
    if (++digits > 19 || (point && scale >= 1'000'000'000)) return std::nullopt;
    mantissa = mantissa * 10 + static_cast<unsigned>(c - '0');
    if (point) scale *= 10;
  }
  if (digits == 0 || (point && scale == 1)) return std::nullopt;
  while (i < text.size() && text[i] == ' ') ++i;
  for (const Unit& unit : units) {
    if (text.substr(i) != unit.name) continue;
    const unsigned __int128 bytes = mantissa * unit.bytes;
    if (bytes % scale != 0 || bytes / scale > INT64_MAX) return std::nullopt;
    return static_cast<std::uint64_t>(bytes / scale);
  }
  return std::nullopt;
}

std::string format_size(std::uint64_t bytes) {
  constexpr std::array<const char*, 5> names = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  double value = static_cast<double>(bytes);
  while (value >= 1024 && unit + 1 < names.size()) {
    value /= 1024;
    ++unit;
  }
  char buffer[48];
  const bool whole = value == std::floor(value) && value < 1e6;
  std::snprintf(buffer, sizeof buffer, whole ? "%.0f %s" : "%.2f %s", value, names[unit]);
  return buffer;
}

}  // namespace ballast::base
