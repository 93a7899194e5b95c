// The model file: a flat JSON object, read strictly.
// SPDX-License-Identifier: Apache-2.0
#include "model.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

namespace ballast::gpt {
namespace {

constexpr std::size_t kModelFileBytesMax = std::size_t{1} << 20;
constexpr const char* kKeys[] = {"type", "layers", "width", "heads", "context", "vocabulary", "tie_embeddings"};

// Limits that keep every product of a valid shape inside 63 bits.
constexpr std::int64_t kLayersMax = 100'000;
constexpr std::int64_t kWidthMax = std::int64_t{1} << 20;
constexpr std::int64_t kContextMax = std::int64_t{1} << 24;
constexpr std::int64_t kVocabularyMax = std::int64_t{1} << 24;

[[noreturn]] void fail(const std::string& name, const std::string& text) { throw ConfigError(name + ": " + text); }

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

std::string nearest_key(std::string_view key) {
  key = key.substr(0, 64);
  return *std::min_element(std::begin(kKeys), std::end(kKeys),
                           [&](const char* a, const char* b) { return edit_distance(key, a) < edit_distance(key, b); });
}

// In quotes, cut to a readable length, without control characters.
std::string in_quotes(std::string_view text) {
  std::string result(1, '"');
  for (const char c : text.substr(0, 64)) result += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
  result += text.size() > 64 ? "...\"" : "\"";
  return result;
}

// Counts what the parser has taken, so that an event knows its line and column.
struct Position {
  std::size_t line = 1;
  std::size_t column = 0;
  std::string text() const { return "line " + std::to_string(line) + ", column " + std::to_string(column); }
};

class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, Position* position) : at_(at), position_(position) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    if (*at_ == '\n') {
      ++position_->line;
      position_->column = 0;
    } else {
      ++position_->column;
    }
    ++at_;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator before = *this;
    ++*this;
    return before;
  }
  friend bool operator==(const CountingIterator& a, const CountingIterator& b) { return a.at_ == b.at_; }
  friend bool operator!=(const CountingIterator& a, const CountingIterator& b) { return !(a == b); }

 private:
  const char* at_;
  Position* position_;
};

// Takes the parser's events without building a document: a model file is one flat object, so nesting ends at once.
class ShapeReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  ShapeReader(std::string name, const Position& position) : name_(std::move(name)), position_(position) {}

  GptShape finish() const {
    if (!closed_) fail(name_, "no JSON object");
    for (const char* key : kKeys) {
      if (std::string_view(key) == "tie_embeddings") continue;
      if (std::find(seen_.begin(), seen_.end(), key) == seen_.end()) fail(name_, in_quotes(key) + " is missing");
    }
    shape_.validate(name_);
    return shape_;
  }

  bool null() override { return wrong("null"); }
  bool boolean(bool value) override {
    if (!open_ || key_ != "tie_embeddings") return wrong(value ? "true" : "false");
    shape_.tie_embeddings = value;
    return true;
  }
  bool number_integer(number_integer_t value) override { return number(value, std::to_string(value)); }
  bool number_unsigned(number_unsigned_t value) override {
    if (value > static_cast<number_unsigned_t>(INT64_MAX)) return wrong(std::to_string(value));
    return number(static_cast<std::int64_t>(value), std::to_string(value));
  }
  bool number_float(number_float_t value, const string_t& text) override {
    if (!(std::abs(value) < 9.0e15) || value != std::floor(value)) return wrong(text);
    return number(static_cast<std::int64_t>(value), text);
  }
  bool string(string_t& value) override {
    if (!open_ || key_ != "type") return wrong(in_quotes(value));
    if (value != "gpt") fail(name_, "\"type\" is " + in_quotes(value) + "; known: \"gpt\"");
    return true;
  }
  bool binary(binary_t&) override { return wrong("binary data"); }
  bool start_object(std::size_t) override {
    if (open_) return wrong("an object");
    open_ = true;
    return true;
  }
  bool key(string_t& value) override {
    if (std::find_if(std::begin(kKeys), std::end(kKeys), [&](const char* k) { return value == k; }) ==
        std::end(kKeys)) {
      fail(name_, "unknown key " + in_quotes(value) + " at " + position_.text() + "; the nearest known one is " +
                      in_quotes(nearest_key(value)));
    }
    if (std::find(seen_.begin(), seen_.end(), value) != seen_.end()) {
      fail(name_, in_quotes(value) + " appears twice, again at " + position_.text());
    }
    seen_.push_back(value);
    key_ = value;
    return true;
  }
  bool end_object() override {
    closed_ = true;
    return true;
  }
  bool start_array(std::size_t) override { return wrong("an array"); }
  bool end_array() override { return true; }
  bool parse_error(std::size_t, const std::string& token, const nlohmann::json::exception& error) override {
    if (error.id == 406) return wrong(token.substr(0, 40));  // JSON, but larger than any number here
    fail(name_, "not valid JSON at " + position_.text() + ", near " + in_quotes(token));
  }

 private:
  bool wrong(const std::string& value) const {
    if (!open_) fail(name_, "a model is a JSON object {\"type\": \"gpt\", ...}, not " + value);
    const char* wanted = key_ == "type" ? "a string" : key_ == "tie_embeddings" ? "true or false" : "a whole number";
    fail(name_, in_quotes(key_) + " must be " + wanted + ", not " + value + " (" + position_.text() + ")");
  }
  bool number(std::int64_t value, const std::string& text) {
    std::int64_t* target = !open_                 ? nullptr
                           : key_ == "layers"     ? &shape_.layers
                           : key_ == "width"      ? &shape_.width
                           : key_ == "heads"      ? &shape_.heads
                           : key_ == "context"    ? &shape_.context
                           : key_ == "vocabulary" ? &shape_.vocabulary
                                                  : nullptr;
    if (target == nullptr) return wrong(text);
    *target = value;
    return true;
  }

  std::string name_;
  const Position& position_;
  GptShape shape_;
  std::string key_;
  std::vector<std::string> seen_;
  bool open_ = false;
  bool closed_ = false;
};

void check_range(const std::string& name, const char* key, std::int64_t value, std::int64_t max) {
  if (value < 1 || value > max) {
    fail(name, in_quotes(key) + " is " + std::to_string(value) + "; it must be from 1 to " + std::to_string(max));
  }
}

ParameterSpec matrix(std::string name, std::int64_t rows, std::int64_t columns) {
  return {std::move(name), {rows, columns}, {.group = kDecayGroup}};
}
ParameterSpec vector_of(std::string name, std::int64_t elements) {
  return {std::move(name), {elements}, {.group = kNoDecayGroup}};
}

}  // namespace

GptShape GptShape::from_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) fail(path, "the model file cannot be opened; does it exist, and may it be read?");
  std::string text(kModelFileBytesMax + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (in.bad() || (in.fail() && !in.eof())) fail(path, "the model file cannot be read; is it a file?");
  text.resize(static_cast<std::size_t>(in.gcount()));
  if (text.size() > kModelFileBytesMax) fail(path, "larger than 1 MiB; this is no model file");
  return from_json(text, path);
}

GptShape GptShape::from_json(std::string_view text, const std::string& name) {
  if (text.find_first_not_of(" \t\r\n") == std::string_view::npos) fail(name, "empty");
  Position position;
  ShapeReader reader(name, position);
  nlohmann::json::sax_parse(CountingIterator(text.data(), &position),
                            CountingIterator(text.data() + text.size(), &position), &reader);
  return reader.finish();
}

void GptShape::validate(const std::string& name) const {
  check_range(name, "layers", layers, kLayersMax);
  check_range(name, "width", width, kWidthMax);
  check_range(name, "heads", heads, width);
  check_range(name, "context", context, kContextMax);
  check_range(name, "vocabulary", vocabulary, kVocabularyMax);
  if (width % heads != 0) {
    fail(name, "\"width\" " + std::to_string(width) + " is not a multiple of \"heads\" " + std::to_string(heads));
  }
}

std::int64_t GptShape::parameters() const {
  const std::int64_t per_block = 12 * width * width + 13 * width;
  const std::int64_t tables = (vocabulary * (tie_embeddings ? 1 : 2) + context) * width;
  return tables + layers * per_block + 2 * width;
}

std::vector<GptUnit> gpt_units(const GptShape& shape) {
  const std::int64_t c = shape.width;
  std::vector<GptUnit> units;
  units.reserve(static_cast<std::size_t>(shape.layers) + 2);
  units.push_back({"embedding", {matrix("wte.weight", shape.vocabulary, c), matrix("wpe.weight", shape.context, c)}});
  for (std::int64_t i = 0; i < shape.layers; ++i) {
    units.push_back(
        {"h." + std::to_string(i),
         {vector_of("ln_1.weight", c), vector_of("ln_1.bias", c), matrix("attn.c_attn.weight", c, 3 * c),
          vector_of("attn.c_attn.bias", 3 * c), matrix("attn.c_proj.weight", c, c), vector_of("attn.c_proj.bias", c),
          vector_of("ln_2.weight", c), vector_of("ln_2.bias", c), matrix("mlp.c_fc.weight", c, 4 * c),
          vector_of("mlp.c_fc.bias", 4 * c), matrix("mlp.c_proj.weight", 4 * c, c), vector_of("mlp.c_proj.bias", c)}});
  }
  units.push_back({"final", {vector_of("ln_f.weight", c), vector_of("ln_f.bias", c)}});
  if (!shape.tie_embeddings) units.back().parameters.push_back(matrix("lm_head.weight", shape.vocabulary, c));
  return units;
}

std::vector<ExpectedAccess> gpt_access_order(const GptShape& shape, const std::vector<UnitId>& units, int slots) {
  // As the trainer goes: see GptTrainer's forward, head and backward.
  std::vector<ExpectedAccess> order;
  const std::size_t last = units.size() - 1;
  const bool tied = shape.tie_embeddings;
  const auto gradient = [&](std::size_t unit, int open_through) {
    order.push_back({.unit = units[unit], .parameters = false, .gradient = true, .open_through = open_through});
  };
  for (std::size_t i = 0; i < last; ++i) order.push_back({.unit = units[i]});
  // The head's parameters stay for all but the last of its gradients.
  const int held = (slots - 1) * (tied ? 2 : 1);
  order.push_back({.unit = units[last], .open_through = held + (tied ? 1 : 0)});
  if (tied) order.push_back({.unit = units[0], .open_through = held});
  for (int slot = 0; slot < slots; ++slot) {
    gradient(last, tied ? 1 : 0);
    if (tied) gradient(0, 0);
  }
  for (std::size_t i = last; i-- > 1;) {
    order.push_back({.unit = units[i], .open_through = slots});
    for (int slot = 0; slot < slots; ++slot) gradient(i, 0);
  }
  for (int slot = 0; slot < slots; ++slot) gradient(0, 0);
  return order;
}

}  // namespace ballast::gpt
