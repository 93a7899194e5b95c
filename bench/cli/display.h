// What people read: a progress line, tables, and numbers at a readable length.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace ballast::cli {

// On a terminal one line that is redrawn; elsewhere a plain line at the start, then ever more rarely (at most every ten
// seconds), and at the end. Writes to standard output.
class Progress {
 public:
  Progress();
  ~Progress();
  // `last`: always shown, and the line is ended.
  void update(const std::string& line, bool last);
  // Ends a drawn line, so that other text starts on a fresh one.
  void finish();

 private:
  bool terminal_;
  bool drawn_ = false;
  bool any_ = false;
  std::chrono::steady_clock::time_point shown_{};
};

// Two columns, aligned.
void print_table(const std::vector<std::pair<std::string, std::string>>& rows);

std::string count_text(double value);              // "10.6 M"
std::string rate_text(double bytes_per_second);    // "6.02 GB/s"
std::string fixed_text(double value, int digits);  // "n/a" where it is not finite

}  // namespace ballast::cli
