// paper_cases FILE.csv: published and derived figures against what the planner's and the simulator's own functions say.
// One line per row, then the counts. Exit status 0; 1 where a `formula` or `upper` row is computed and missed; 2 where
// there is no such table.
//
// A row: id,source,quantity,inputs,expected,unit,tolerance,note. `inputs` is key=value;key=value; `tolerance` relative;
// `note` is origin|check|text with check one of formula, model (within the tolerance), upper (from 0.98 of what is
// expected to 1 + tolerance of it) and fact (nothing to predict from).
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "planner/predictions.h"

namespace ballast::testing {
namespace {

std::string trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t\r");
  if (begin == text.npos) return {};
  return std::string(text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1));
}

std::vector<std::string> split(std::string_view text, char by) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(by, begin), text.size());
    parts.push_back(trimmed(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return parts;
}

constexpr std::array<std::string_view, 8> kColumns = {"id",       "source", "quantity",  "inputs",
                                                      "expected", "unit",   "tolerance", "note"};
enum Column : std::size_t { kId, kSource, kQuantity, kInputs, kExpected, kUnit, kTolerance, kNote };

struct Counts {
  int computed = 0, hit = 0, missed = 0, not_computed = 0;
  bool failed = false;  // a row that must hit has missed
};

double number_of(const std::string& text, const char* what) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !std::isfinite(value))
    throw NotComputed(std::string(what) + " \"" + text + "\" is no number");
  return value;
}

bool hits(double predicted, double expected, double tolerance, const std::string& check) {
  constexpr double kRounding = 1e-9;  // the table's own numbers are decimal
  if (check == "upper")
    return predicted >= 0.98 * expected - kRounding * std::fabs(expected) &&
           predicted <= (1 + tolerance + kRounding) * expected;
  return std::fabs(predicted - expected) <= (tolerance + kRounding) * std::fabs(expected);
}

void look_at(const std::string& line, const std::array<std::size_t, 8>& place, Counts& counts) {
  const std::vector<std::string> fields = split(line, ',');
  const auto field = [&](Column column) { return place[column] < fields.size() ? fields[place[column]] : ""; };
  const std::string id = field(kId).empty() ? "(no id)" : field(kId);
  try {
    if (fields.size() < kColumns.size()) throw NotComputed("the row has " + std::to_string(fields.size()) + " fields");
    const std::vector<std::string> note = split(field(kNote), '|');
    const std::string check = note.size() > 1 ? note[1] : "";
    if (check == "fact") throw NotComputed("a fact, with nothing to predict it from");
    if (check != "formula" && check != "upper" && check != "model")
      throw NotComputed("the note names no check that is known");
    PaperCase row{id, field(kQuantity), field(kUnit), {}};
    for (const std::string& input : split(field(kInputs), ';')) {
      const std::size_t equals = input.find('=');
      if (equals != input.npos) row.inputs[trimmed(input.substr(0, equals))] = trimmed(input.substr(equals + 1));
    }
    const double expected = number_of(field(kExpected), "what is expected,");
    const double tolerance = number_of(field(kTolerance), "the tolerance");
    const Prediction prediction = predict(row);
    const bool hit = hits(prediction.value, expected, tolerance, check);
    ++counts.computed;
    ++(hit ? counts.hit : counts.missed);
    counts.failed |= !hit && check != "model";
    std::printf("%-26s predicted %-12.6g expected %-10.6g %-14s tolerance %-6g %-7s %s by %s (%+.1f %%)\n", id.c_str(),
                prediction.value, expected, row.unit.c_str(), tolerance, check.c_str(), hit ? "hit" : "MISS",
                prediction.by.c_str(), expected == 0 ? 0 : 100 * (prediction.value / expected - 1));
  } catch (const std::exception& reason) {
    ++counts.not_computed;
    std::printf("%-26s predicted -            expected %-10s %-14s tolerance %-6s -       not computed: %s\n",
                id.c_str(), field(kExpected).c_str(), field(kUnit).c_str(), field(kTolerance).c_str(), reason.what());
  }
}

int run(const char* path) {
  std::ifstream in(path);
  std::string line;
  if (!in || !std::getline(in, line)) {
    std::fprintf(stderr, "paper_cases: %s cannot be read\n", path);
    return 2;
  }
  if (line.substr(0, 3) == "\xEF\xBB\xBF") line.erase(0, 3);
  std::array<std::size_t, 8> place{};
  const std::vector<std::string> header = split(line, ',');
  for (std::size_t i = 0; i < kColumns.size(); ++i) {
    const auto found = std::find(header.begin(), header.end(), kColumns[i]);
    if (found == header.end()) {
      std::fprintf(stderr, "paper_cases: %s has no column \"%s\"\n", path, std::string(kColumns[i]).c_str());
      return 2;
    }
    place[i] = static_cast<std::size_t>(found - header.begin());
  }
  Counts counts;
  while (std::getline(in, line)) {
    if (!trimmed(line).empty()) look_at(line, place, counts);
  }
  std::printf("computed %d hit %d missed %d not_computed %d\n", counts.computed, counts.hit, counts.missed,
              counts.not_computed);
  return counts.failed ? 1 : 0;
}

}  // namespace
}  // namespace ballast::testing

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: paper_cases FILE.csv\n");
    return 2;
  }
  return ballast::testing::run(argv[1]);
}
