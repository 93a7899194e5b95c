// Progress and tables.
// SPDX-License-Identifier: Apache-2.0
#include "display.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace ballast::cli {

Progress::Progress() : terminal_(::isatty(STDOUT_FILENO) == 1) {}

Progress::~Progress() { finish(); }

void Progress::update(const std::string& line, bool last) {
  const auto now = std::chrono::steady_clock::now();
  const auto pause = terminal_ ? std::chrono::milliseconds(100) : std::chrono::milliseconds(10'000);
  if (any_ && !last && now - shown_ < pause) return;
  shown_ = now;
  any_ = true;
  if (terminal_) {
    std::printf("\r\033[K%s", line.c_str());
    drawn_ = true;
    if (last) finish();
  } else {
    std::printf("%s\n", line.c_str());
  }
  std::fflush(stdout);
}

void Progress::finish() {
  if (!drawn_) return;
  std::printf("\n");
  std::fflush(stdout);
  drawn_ = false;
}

void print_table(const std::vector<std::pair<std::string, std::string>>& rows) {
  std::size_t width = 0;
  for (const auto& [name, value] : rows) width = std::max(width, name.size());
  for (const auto& [name, value] : rows)
    std::printf("  %-*s  %s\n", static_cast<int>(width), name.c_str(), value.c_str());
  std::fflush(stdout);
}

std::string fixed_text(double value, int digits) {
  if (!std::isfinite(value)) return "n/a";
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

std::string count_text(double value) {
  const std::pair<double, const char*> units[] = {{1e12, " T"}, {1e9, " G"}, {1e6, " M"}, {1e3, " k"}};
  for (const auto& [unit, name] : units)
    if (value >= unit) return fixed_text(value / unit, value / unit < 10 ? 2 : value / unit < 100 ? 1 : 0) + name;
  return fixed_text(value, 0);
}

std::string rate_text(double bytes_per_second) { return fixed_text(bytes_per_second / 1e9, 2) + " GB/s"; }

}  // namespace ballast::cli
