// A strict reader of small JSON texts into values that remember where they stood. Duplicate keys, a byte-order mark,
// comments, deep nesting and huge texts are errors; numbers keep their digits.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/error.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ballast::json {

constexpr std::size_t kTextBytesMax = std::size_t{1} << 20;
constexpr std::size_t kDepthMax = 32;
constexpr std::size_t kMembersMax = 1000;

struct Value {
  enum class Kind : std::uint8_t { null, boolean, number, string, array, object } kind = Kind::null;
  bool boolean = false;
  std::string text;               // a string's contents; a number's digits
  std::vector<Value> items;       // of an array or object, as written
  std::vector<std::string> keys;  // of an object's items
  std::string where;              // "FILE:LINE", or the option that it came from

  const Value* find(std::string_view key) const;
  Value* find(std::string_view key);
  Value& add(std::string key, Value value);  // to an object without that key
};

// A number that is JSON and beyond what any number here can be, such as 1e400.
class NumberTooLarge : public ConfigError {
 public:
  NumberTooLarge(const std::string& where, std::string_view number);
  const std::string digits;  // cut at 40
};
constexpr int kNumberTooLarge = 406;  // the parser's number for it

// Throws ConfigError with one line: `name`, line and column, and what is wrong.
Value parse(std::string_view text, const std::string& name);

// The integer that a number's digits stand for ("5e8" is one), exactly; nothing for a fraction or beyond 64 bits.
std::optional<std::int64_t> exact_integer(std::string_view digits);
// Nothing where a double does not hold it: too large, or too close to 0.
std::optional<double> to_double(std::string_view digits);

// `text` in quotes for an error line: control and non-ASCII bytes replaced, cut at 60 characters.
std::string printable(std::string_view text);
// "the string \"x\"", "the number 3", "null", "a list", "an object": for error lines.
std::string describe(const Value& value);

}  // namespace ballast::json
