// Files read and written by whole calls: one that is only read, and one that appears when it is whole.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace ballast::engine {

// A regular file. Throws IoError naming it, CorruptionError where it ends before what is asked for.
class InputFile {
 public:
  explicit InputFile(std::string path);
  ~InputFile();
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&&) = delete;
  void read(std::uint64_t offset_bytes, void* data, std::uint64_t bytes) const;
  std::uint64_t bytes() const { return bytes_; }  // when it was opened
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int descriptor_ = -1;
  std::uint64_t bytes_ = 0;
};

// Appears under its name, durable, at publish(), and not at all otherwise. Throws IoError, before anything is made
// where the folder has no room for `bytes` or this process may not write as many.
class WholeFile {
 public:
  WholeFile(const std::string& folder, const std::string& name, std::uint64_t bytes);
  ~WholeFile();
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;
  void write(const void* data, std::size_t bytes);
  void publish();

 private:
  [[noreturn]] void fail(const char* what, std::size_t wanted_bytes = 0) const;
  const std::string path_, temporary_;
  int descriptor_ = -1;
};

}  // namespace ballast::engine
