// Fixed little-endian bytes, written and read back. The reader trusts nothing: what does not fit the bytes that are
// left is an error, before anything is allocated for it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/error.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace ballast::engine {

static_assert(std::endian::native == std::endian::little, "the formats on disk are little-endian");

class ByteWriter {
 public:
  template <class Number>
  void number(Number value) {
    static_assert(std::is_arithmetic_v<Number> || std::is_enum_v<Number>);
    raw(std::as_bytes(std::span(&value, 1)));
  }
  void text(std::string_view value) {
    number(static_cast<std::uint64_t>(value.size()));
    raw(std::as_bytes(std::span(value)));
  }
  void blob(std::span<const std::byte> value) {
    number(static_cast<std::uint64_t>(value.size()));
    raw(value);
  }
  void raw(std::span<const std::byte> value) { bytes_.insert(bytes_.end(), value.begin(), value.end()); }
  std::vector<std::byte> take() { return std::move(bytes_); }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

// Throws CorruptionError where the bytes end too early or hold what cannot be.
class ByteReader {
 public:
  ByteReader(std::span<const std::byte> bytes, std::string name) : left_(bytes), name_(std::move(name)) {}

  template <class Number>
  Number number() {
    static_assert(std::is_arithmetic_v<Number>);
    Number value;
    std::memcpy(&value, raw(sizeof value).data(), sizeof value);
    return value;
  }
  // A number that counts things of at least `least_bytes` each.
  std::uint64_t count(std::uint64_t least_bytes) {
    const auto value = number<std::uint64_t>();
    if (value > left_.size() / least_bytes) fail("a count of " + std::to_string(value) + " does not fit what follows");
    return value;
  }
  std::string text() {
    const std::span<const std::byte> bytes = raw(count(1));
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  std::vector<std::byte> blob() {
    const std::span<const std::byte> bytes = raw(count(1));
    return {bytes.begin(), bytes.end()};
  }
  std::span<const std::byte> raw(std::uint64_t bytes) {
    if (bytes > left_.size()) fail("it ends too early");
    const std::span<const std::byte> taken = left_.first(bytes);
    left_ = left_.subspan(bytes);
    return taken;
  }
  bool empty() const { return left_.empty(); }
  [[noreturn]] void fail(const std::string& why) const {
    throw CorruptionError(name_ + " is damaged or no such file: " + why);
  }

 private:
  std::span<const std::byte> left_;
  std::string name_;
};

}  // namespace ballast::engine
