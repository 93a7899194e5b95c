// Which of the planner's functions answers which quantity of a table of published figures.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <stdexcept>
#include <string>

namespace ballast::testing {

// Why a row is not computed.
class NotComputed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct PaperCase {
  std::string id, quantity, unit;
  std::map<std::string, std::string> inputs;
  // A number of the inputs; NotComputed where it is missing or none.
  double number(const std::string& key) const;
  double number_or(const std::string& key, double otherwise) const;
  const std::string& text(const std::string& key) const;
  bool has(const std::string& key) const { return inputs.count(key) > 0; }
};

struct Prediction {
  double value = 0;  // in the row's unit
  std::string by;    // "formula" or "simulator"
};

// Chosen by the quantity and the inputs that are there, never by the row's name. Throws NotComputed, or ConfigError
// where the planner refuses the inputs.
Prediction predict(const PaperCase& row);

}  // namespace ballast::testing
