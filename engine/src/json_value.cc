// Strict JSON on nlohmann's event parser, which neither recurses nor allocates by what a text claims.
// SPDX-License-Identifier: Apache-2.0
#include "json_value.h"

#include <ballast/base/error.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

namespace ballast::json {
namespace {

// How far the lexer has read, which its events do not say.
struct Progress {
  std::size_t lines = 0;
  char last = ' ';
};

struct CountingIterator {
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  const char* at = nullptr;
  Progress* progress = nullptr;

  reference operator*() const { return *at; }
  CountingIterator& operator++() {
    progress->last = *at++;
    if (progress->last == '\n') ++progress->lines;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator before = *this;
    ++*this;
    return before;
  }
  friend bool operator==(const CountingIterator& a, const CountingIterator& b) { return a.at == b.at; }
};

class Builder : public nlohmann::json::json_sax_t {
 public:
  Builder(std::string_view text, const std::string& name, const Progress& progress)
      : text_(text), name_(name), progress_(progress) {}

  Value take() { return std::move(root_); }

  bool null() override { return add(Value::Kind::null), true; }
  bool boolean(bool value) override {
    add(Value::Kind::boolean).boolean = value;
    return true;
  }
  bool number_integer(number_integer_t value) override {
    add(Value::Kind::number).text = std::to_string(value);
    return true;
  }
  bool number_unsigned(number_unsigned_t value) override {
    add(Value::Kind::number).text = std::to_string(value);
    return true;
  }
  bool number_float(number_float_t, const string_t& digits) override {
    add(Value::Kind::number).text = digits;
    return true;
  }
  bool string(string_t& value) override {
    add(Value::Kind::string).text = std::move(value);
    return true;
  }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(Value::Kind::object); }
  bool start_array(std::size_t) override { return open(Value::Kind::array); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    if (open_.back()->keys.size() == kMembersMax)
      throw ConfigError(where() + ": more than " + std::to_string(kMembersMax) + " keys in one object");
    if (open_.back()->find(name) != nullptr)
      throw ConfigError(where() + ": the key " + printable(name) + " is there twice");
    key_ = std::move(name);
    return true;
  }

  bool parse_error(std::size_t position, const std::string& token, const nlohmann::detail::exception& error) override {
    if (error.id == kNumberTooLarge)
      throw NumberTooLarge(where() + ": " + (key_.empty() ? "" : printable(key_) + " cannot be that: "), token);
    // nlohmann's text repeats its own name and the place, and may quote megabytes of the input.
    std::string_view what = error.what();
    if (const auto cut = what.find(": "); cut != what.npos && what.starts_with("[json.exception.parse_error"))
      what.remove_prefix(cut + 2);
    else if (const auto end = what.find("] "); end != what.npos)
      what.remove_prefix(end + 2);
    std::string reason;
    for (const char c : what.substr(0, 160)) reason += c >= 32 && c < 127 ? c : '?';
    const std::size_t before = std::min(position > 0 ? position - 1 : 0, text_.size());
    const std::size_t line_start = text_.substr(0, before).rfind('\n');
    const std::size_t column = line_start == text_.npos ? before + 1 : before - line_start;
    const auto lines = std::count(text_.begin(), text_.begin() + static_cast<std::ptrdiff_t>(before), '\n');
    throw ConfigError(name_ + ":" + std::to_string(lines + 1) + ":" + std::to_string(column) + ": not JSON" +
                      (key_.empty() ? "" : " (after the key " + printable(key_) + ")") + ": " + reason);
  }

 private:
  // The lexer has read a token, which has no line breaks inside, and at most one character more.
  std::string where() const { return name_ + ":" + std::to_string(progress_.lines + (progress_.last == '\n' ? 0 : 1)); }
  Value& add(Value::Kind kind) {
    Value* value = &root_;
    if (!open_.empty()) {
      Value& parent = *open_.back();
      if (parent.kind == Value::Kind::object) {
        value = &parent.add(key_, Value{});
      } else {
        value = &parent.items.emplace_back();
      }
    }
    value->kind = kind;
    value->where = where();
    return *value;
  }
  bool open(Value::Kind kind) {
    if (open_.size() == kDepthMax)
      throw ConfigError(where() + ": nested deeper than " + std::to_string(kDepthMax) + " levels");
    open_.push_back(&add(kind));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  std::string_view text_;
  const std::string& name_;
  const Progress& progress_;
  Value root_;
  std::vector<Value*> open_;  // each is the last child of the one before, so none of them moves
  std::string key_;           // the last one read
};

}  // namespace

NumberTooLarge::NumberTooLarge(const std::string& where, std::string_view number)
    : ConfigError(where + "the number " + std::string(number.substr(0, 40)) + " is too large, above 1.8e308"),
      digits(number.substr(0, 40)) {}

const Value* Value::find(std::string_view key) const {
  for (std::size_t i = 0; i < keys.size(); ++i)
    if (keys[i] == key) return &items[i];
  return nullptr;
}

Value* Value::find(std::string_view key) { return const_cast<Value*>(std::as_const(*this).find(key)); }

Value& Value::add(std::string key, Value value) {
  keys.push_back(std::move(key));
  return items.emplace_back(std::move(value));
}

Value parse(std::string_view text, const std::string& name) {
  if (text.size() > kTextBytesMax)
    throw ConfigError(name + ": larger than 1 MiB; such a file holds a few hundred bytes of JSON");
  if (text.starts_with("\xEF\xBB\xBF"))
    throw ConfigError(name + ":1:1: starts with a byte-order mark; save it as plain UTF-8");
  Progress progress;
  Builder builder(text, name, progress);
  const CountingIterator begin{text.data(), &progress};
  const CountingIterator end{text.data() + text.size(), &progress};
  if (!nlohmann::json::sax_parse(begin, end, &builder)) throw ConfigError(name + ": not JSON");
  return builder.take();
}

std::optional<std::int64_t> exact_integer(std::string_view digits) {
  const bool negative = digits.starts_with('-');
  if (negative) digits.remove_prefix(1);
  std::string significant;
  std::int64_t exponent = 0;
  bool point = false;
  std::size_t i = 0;
  for (; i < digits.size() && digits[i] != 'e' && digits[i] != 'E'; ++i) {
    if (digits[i] == '.') {
      point = true;
    } else {
      significant += digits[i];
      if (point) --exponent;
    }
  }
  if (i < digits.size()) {
    std::string_view power = digits.substr(i + 1);
    if (power.starts_with('+')) power.remove_prefix(1);
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(power.data(), power.data() + power.size(), value);
    if (error != std::errc{} || end != power.data() + power.size() || value > 1000 || value < -1000'000)
      return std::nullopt;
    exponent += value;
  }
  while (significant.size() > 1 && significant.back() == '0') {
    significant.pop_back();
    ++exponent;
  }
  significant.erase(0, std::min(significant.find_first_not_of('0'), significant.size()));
  if (significant.empty()) return 0;
  if (exponent < 0 || significant.size() + static_cast<std::size_t>(exponent) > 19) return std::nullopt;
  significant.append(static_cast<std::size_t>(exponent), '0');
  if (negative) significant.insert(0, 1, '-');
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(significant.data(), significant.data() + significant.size(), value);
  if (error != std::errc{} || end != significant.data() + significant.size()) return std::nullopt;
  return value;
}

std::optional<double> to_double(std::string_view digits) {
  double value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc{} || end != digits.data() + digits.size()) return std::nullopt;
  return value;
}

std::string printable(std::string_view text) {
  std::string result = "\"";
  for (const char c : text.substr(0, 60)) result += c >= 32 && c < 127 ? c : '?';
  if (text.size() > 60) result += "...";
  return result + "\"";
}

std::string describe(const Value& value) {
  switch (value.kind) {
    case Value::Kind::null:
      return "null";
    case Value::Kind::boolean:
      return value.boolean ? "true" : "false";
    case Value::Kind::number:
      return "the number " + value.text.substr(0, 40);
    case Value::Kind::string:
      return "the string " + printable(value.text);
    case Value::Kind::array:
      return "a list";
    case Value::Kind::object:
      return "an object";
  }
  return "";
}

}  // namespace ballast::json
