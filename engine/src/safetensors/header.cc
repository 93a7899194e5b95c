// What a safetensors header or index says, and whether it can be.
// SPDX-License-Identifier: Apache-2.0
#include "safetensors/header.h"

#include <ballast/base/error.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "json_value.h"

namespace ballast::engine {
namespace {

// What a double holds exactly: beyond it other readers would round.
constexpr std::uint64_t kNumberMax = std::uint64_t{1} << 53;
constexpr std::size_t kDimensionsMax = 64;
constexpr std::size_t kIndexDepthMax = 16;

// The parser's calls; none of them recurses, so that depth costs nothing. Whatever a state does not expect is refused.
class Events : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Events(std::string file) : file_(std::move(file)) {}

  bool null() override { return value("null"); }
  bool boolean(bool) override { return value("a truth value"); }
  bool number_integer(number_integer_t number) override { return value("the number " + std::to_string(number)); }
  bool number_float(number_float_t, const string_t& digits) override {
    return value("the number " + digits.substr(0, 60));
  }
  bool binary(binary_t&) override { return value("bytes"); }
  bool parse_error(std::size_t position, const std::string& token, const nlohmann::detail::exception& error) override {
    if (error.id == json::kNumberTooLarge) {
      const std::string number = "the number " + token.substr(0, 60);
      value(number);  // where none is expected it says more
      fail("it holds " + number + ", which is too large");
    }
    fail("its JSON is wrong at byte " + std::to_string(position));
  }

 protected:
  virtual bool value(const std::string& what) = 0;  // of a kind that is nowhere expected, or anything
  [[noreturn]] void fail(const std::string& what) const { throw CorruptionError(file_ + ": " + what); }
  const std::string& file() const { return file_; }

 private:
  const std::string file_;
};

class HeaderEvents final : public Events {
 public:
  using Events::Events;
  SafetensorsHeader take() { return std::move(header_); }

 private:
  enum class In : std::uint8_t { nothing, header, metadata, tensor, shape, offsets, end };
  enum Field : std::uint8_t { none = 0, dtype = 1, shape = 2, offsets = 4 };

  SafetensorsEntry& tensor() { return header_.tensors.back(); }
  [[noreturn]] void refuse(const std::string& what) {
    if (in_ == In::nothing || in_ == In::header) fail("the header holds " + what + where_key());
    if (in_ == In::metadata) fail("the metadata hold " + what + where_key() + ", and only texts can be there");
    fail("tensor " + json::printable(tensor().name) + ": " + what + where_key());
  }
  std::string where_key() const { return key_.empty() ? "" : " at " + json::printable(key_); }

  bool value(const std::string& what) override { refuse(what); }
  bool number_unsigned(number_unsigned_t number) override {
    if (in_ != In::shape && in_ != In::offsets) refuse("the number " + std::to_string(number));
    if (number > kNumberMax) refuse("the number " + std::to_string(number) + ", which is beyond 2^53,");
    if (in_ == In::shape) {
      if (tensor().shape.size() == kDimensionsMax) refuse("more than 64 dimensions");
      tensor().shape.push_back(static_cast<std::int64_t>(number));
    } else {
      if (offset_count_ == 2) refuse("more than two offsets");
      (offset_count_++ == 0 ? tensor().begin_bytes : tensor().end_bytes) = number;
    }
    return true;
  }
  bool string(string_t& text) override {
    if (in_ == In::metadata) {
      header_.metadata.emplace_back(std::move(key_), std::move(text));
      return true;
    }
    if (in_ != In::tensor || field_ != dtype) refuse("the text " + json::printable(text));
    if (!safetensors_bits(text)) refuse("unknown dtype " + json::printable(text));
    tensor().dtype = std::move(text);
    return true;
  }
  bool start_object(std::size_t) override {
    if (in_ == In::nothing) {
      in_ = In::header;
    } else if (in_ == In::header) {
      if (key_ == kSafetensorsMetadata) {
        if (metadata_seen_) fail("the metadata come twice");
        metadata_seen_ = true;
        in_ = In::metadata;
      } else {
        header_.tensors.emplace_back().name = std::move(key_);
        fields_ = none;
        in_ = In::tensor;
      }
      key_.clear();
    } else {
      refuse("an object");
    }
    return true;
  }
  bool key(string_t& text) override {
    key_ = text;
    if (in_ != In::tensor) return true;
    field_ = text == "dtype" ? dtype : text == "shape" ? shape : text == "data_offsets" ? offsets : none;
    if (field_ == none) refuse("an unknown key");
    if ((fields_ & field_) != 0) refuse("twice the same key");
    fields_ |= field_;
    return true;
  }
  bool start_array(std::size_t) override {
    if (in_ != In::tensor || (field_ != shape && field_ != offsets)) refuse("a list");
    in_ = field_ == shape ? In::shape : In::offsets;
    offset_count_ = 0;
    return true;
  }
  bool end_array() override {
    if (in_ == In::offsets && offset_count_ != 2) refuse(std::to_string(offset_count_) + " offsets instead of two");
    in_ = In::tensor;
    return true;
  }
  bool end_object() override {
    key_.clear();
    if (in_ == In::tensor) {
      if ((fields_ & dtype) == 0) refuse("it has no dtype");
      if ((fields_ & shape) == 0) refuse("it has no shape");
      if ((fields_ & offsets) == 0) refuse("it has no data_offsets");
    }
    in_ = in_ == In::header ? In::end : In::header;
    return true;
  }

  SafetensorsHeader header_;
  std::string key_;
  In in_ = In::nothing;
  Field field_ = none;
  std::uint8_t fields_ = none;
  int offset_count_ = 0;
  bool metadata_seen_ = false;
};

// weight_map is what counts; the rest may be anything.
class IndexEvents final : public Events {
 public:
  using Events::Events;
  std::vector<std::pair<std::string, std::string>> take() {
    if (!seen_) fail("it has no weight_map");
    return std::move(map_);
  }

 private:
  bool in_map() const { return depth_ == 2 && map_open_; }
  bool value(const std::string& what) override {
    if (depth_ == 0 || map_open_) fail("weight_map or the whole holds " + what);
    if (depth_ == 1 && key_ == "weight_map") fail("weight_map is " + what);
    return true;
  }
  bool number_unsigned(number_unsigned_t number) override { return value("the number " + std::to_string(number)); }
  bool string(string_t& text) override {
    if (!in_map()) return value("a text");
    if (text.empty() || text == "." || text == ".." || text.find('/') != text.npos || text.find('\0') != text.npos) {
      fail("tensor " + json::printable(key_) + " is said to be in " + json::printable(text) +
           ", which is no name of a file beside the index");
    }
    map_.emplace_back(std::move(key_), std::move(text));
    return true;
  }
  bool key(string_t& text) override {
    key_ = text;
    if (depth_ == 1 && key_ == "weight_map") {
      if (seen_) fail("weight_map comes twice");
      seen_ = true;
    }
    return true;
  }
  bool start_object(std::size_t) override {
    if (map_open_) fail("weight_map holds an object");
    if (depth_ == 1 && key_ == "weight_map") map_open_ = true;
    return enter();
  }
  bool start_array(std::size_t) override {
    value("a list");
    return enter();
  }
  bool end_object() override {
    if (depth_ == 2) map_open_ = false;
    return leave();
  }
  bool end_array() override { return leave(); }
  bool enter() {
    if (++depth_ > kIndexDepthMax) fail("it is nested too deeply");
    key_.clear();
    return true;
  }
  bool leave() {
    --depth_;
    return true;
  }

  std::vector<std::pair<std::string, std::string>> map_;
  std::string key_;
  std::size_t depth_ = 0;
  bool map_open_ = false, seen_ = false;
};

void parse(std::string_view text, const std::string& file, Events& events) {
  // The parser would pass over a byte-order mark.
  if (text.empty() || text.front() != '{') throw CorruptionError(file + ": its JSON does not begin with {");
  // The parser would take it for the end of the text.
  if (const std::size_t at = text.find('\0'); at != text.npos) {
    throw CorruptionError(file + ": its JSON holds a zero byte, at byte " + std::to_string(at));
  }
  nlohmann::json::sax_parse(text.begin(), text.end(), &events);
}

// Sorts them by what must be different.
void require_different(std::vector<std::pair<std::string, std::string>>& pairs, const char* what,
                       const std::string& file) {
  std::sort(pairs.begin(), pairs.end());
  for (std::size_t i = 1; i < pairs.size(); ++i) {
    if (pairs[i].first == pairs[i - 1].first) {
      throw CorruptionError(file + ": " + what + " " + json::printable(pairs[i].first) + " comes twice");
    }
  }
}

void check_size(SafetensorsEntry& tensor, const std::string& file) {
  const auto refuse = [&](const std::string& what) {
    throw CorruptionError(file + ": tensor " + json::printable(tensor.name) + " " + what);
  };
  const std::string range =
      "[" + std::to_string(tensor.begin_bytes) + ", " + std::to_string(tensor.end_bytes) + ") of the data";
  if (tensor.begin_bytes > tensor.end_bytes) refuse("ends before it begins: " + range);
  tensor.elements = 1;
  if (std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end()) tensor.elements = 0;
  for (const std::int64_t dimension : tensor.shape) {
    if (tensor.elements == 0) break;
    if (static_cast<std::uint64_t>(dimension) > kNumberMax / tensor.elements) refuse("has more than 2^53 elements");
    tensor.elements *= static_cast<std::uint64_t>(dimension);
  }
  const std::uint64_t bits = tensor.elements * *safetensors_bits(tensor.dtype);
  if (bits % 8 != 0) refuse("does not end with a whole byte");
  if (bits / 8 != tensor.end_bytes - tensor.begin_bytes) {
    refuse("has " + std::to_string(tensor.elements) + " elements of " + tensor.dtype + ", " + std::to_string(bits / 8) +
           " bytes, and is said to be at " + range);
  }
}

}  // namespace

std::optional<std::uint64_t> safetensors_bits(std::string_view dtype) {
  struct Type {
    const char* name;
    std::uint64_t bits;
  };
  static constexpr std::array<Type, 20> kTypes = {
      {{"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},   {"I8", 8},    {"F8_E5M2", 8},
       {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16}, {"BF16", 16}, {"I32", 32},
       {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},    {"I64", 64}, {"U64", 64}}};
  for (const Type& type : kTypes) {
    if (dtype == type.name) return type.bits;
  }
  return std::nullopt;
}

SafetensorsHeader parse_safetensors_header(std::string_view text, std::uint64_t data_bytes, const std::string& file) {
  HeaderEvents events(file);
  parse(text, file, events);
  SafetensorsHeader header = events.take();
  require_different(header.metadata, "metadata key", file);
  std::vector<SafetensorsEntry>& tensors = header.tensors;
  std::vector<const SafetensorsEntry*> by_name;
  for (SafetensorsEntry& tensor : tensors) {
    check_size(tensor, file);
    by_name.push_back(&tensor);
  }
  const auto less = [](const SafetensorsEntry* a, const SafetensorsEntry* b) { return a->name < b->name; };
  std::sort(by_name.begin(), by_name.end(), less);
  for (std::size_t i = 1; i < by_name.size(); ++i) {
    if (by_name[i]->name == by_name[i - 1]->name) {
      throw CorruptionError(file + ": tensor " + json::printable(by_name[i]->name) + " comes twice");
    }
  }
  std::stable_sort(tensors.begin(), tensors.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::pair(a.begin_bytes, a.end_bytes) < std::pair(b.begin_bytes, b.end_bytes);
  });
  const std::uint64_t head = 8 + text.size();
  std::uint64_t end = 0;
  const SafetensorsEntry* last = nullptr;
  for (const SafetensorsEntry& tensor : tensors) {
    if (tensor.begin_bytes != end) {
      const bool hole = tensor.begin_bytes > end;
      throw CorruptionError(file + ": tensor " + json::printable(tensor.name) + " begins at byte " +
                            std::to_string(tensor.begin_bytes) + " of the data, and what lies before it" +
                            (last != nullptr ? ", " + json::printable(last->name) + "," : "") + " ends at " +
                            std::to_string(end) + (hole ? ": a hole" : ": they overlap"));
    }
    end = tensor.end_bytes;
    last = &tensor;
  }
  if (end != data_bytes) {
    throw CorruptionError(file + " has " + std::to_string(head + data_bytes) +
                          " bytes, and its header says that there are " + std::to_string(head + end) +
                          (end > data_bytes ? ": it is cut short" : ": something follows the last tensor"));
  }
  return header;
}

std::vector<std::pair<std::string, std::string>> parse_safetensors_index(std::string_view text,
                                                                         const std::string& file) {
  IndexEvents events(file);
  parse(text, file, events);
  std::vector<std::pair<std::string, std::string>> map = events.take();
  require_different(map, "tensor", file);
  return map;
}

}  // namespace ballast::engine
