// Edit distance over configuration keys.
// SPDX-License-Identifier: Apache-2.0
#include "nearest_key.h"

#include <algorithm>
#include <cctype>
#include <limits>
#include <vector>

namespace ballast {
namespace {

// Levenshtein with transpositions, in quarter edits so that a difference in case can cost less than an edit.
int distance(std::string_view a, std::string_view b) {
  const std::size_t width = b.size() + 1;
  std::vector<int> table((a.size() + 1) * width);
  const auto at = [&](std::size_t i, std::size_t j) -> int& { return table[i * width + j]; };
  const auto lower = [](char c) { return std::tolower(static_cast<unsigned char>(c)); };
  for (std::size_t i = 0; i <= a.size(); ++i) at(i, 0) = static_cast<int>(i) * 4;
  for (std::size_t j = 0; j <= b.size(); ++j) at(0, j) = static_cast<int>(j) * 4;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const int change = a[i - 1] == b[j - 1] ? 0 : lower(a[i - 1]) == lower(b[j - 1]) ? 1 : 4;
      at(i, j) = std::min({at(i - 1, j) + 4, at(i, j - 1) + 4, at(i - 1, j - 1) + change});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        at(i, j) = std::min(at(i, j), at(i - 2, j - 2) + 4);
    }
  }
  return at(a.size(), b.size());
}

std::pair<std::string_view, std::string_view> split(std::string_view key) {
  const std::size_t dot = key.rfind('.');
  if (dot == key.npos) return {{}, key};
  return {key.substr(0, dot), key.substr(dot + 1)};
}

}  // namespace

std::string_view nearest_key(std::string_view unknown, std::span<const std::string_view> known) {
  const std::string_view whole = unknown.substr(0, 200);
  const auto [section, name] = split(whole);
  std::string_view best;
  int best_distance = std::numeric_limits<int>::max();
  for (const std::string_view key : known) {
    const auto [known_section, known_name] = split(key);
    int cost = distance(name, known_name);
    // "timeout" for "timeout_seconds": a word left out is one slip, however long the word.
    if (name.size() >= 3 && known_name.find(name) != known_name.npos) cost = std::min(cost, 8);
    if (section != known_section) cost += 3;
    cost = std::min(cost, distance(whole, key));
    if (cost < best_distance) {
      best = key;
      best_distance = cost;
    }
  }
  return best;
}

bool is_misspelling(std::string_view unknown, std::string_view known) {
  const auto [section, name] = split(unknown);
  const auto [known_section, known_name] = split(known);
  return section == known_section && name.size() >= 6 && name.size() <= 200 && distance(name, known_name) <= 8;
}

}  // namespace ballast
