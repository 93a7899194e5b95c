// The training text: the bytes of any file, read where they are needed, and the batches drawn from it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace ballast::gpt {

// A file open for reading; its bytes stay in the file. Any thread.
class ByteData {
 public:
  // Throws ConfigError where the path is missing, unreadable, empty or not a regular file.
  static std::shared_ptr<const ByteData> open(const std::string& path);
  ~ByteData();
  ByteData(const ByteData&) = delete;
  ByteData& operator=(const ByteData&) = delete;

  const std::string& path() const { return path_; }
  std::uint64_t bytes() const { return bytes_; }
  // Throws ConfigError naming the file and the numbers where no sequence of that length and its next byte fit.
  void require_sequence(std::int64_t sequence) const;
  // Throws IoError with file and offset.
  void read(std::uint64_t offset, std::span<std::uint8_t> target) const;

  // Of its length and of the bytes at its beginning and its end.
  std::uint64_t fingerprint() const;

  // Where the row-th sequence of batch `index` begins: a pure function of all arguments.
  std::uint64_t sequence_offset(std::uint64_t seed, std::uint64_t index, std::uint64_t row,
                                std::int64_t sequence) const;

 private:
  ByteData(std::string path, int descriptor, std::uint64_t bytes);
  std::string path_;
  int descriptor_;
  std::uint64_t bytes_;
};

}  // namespace ballast::gpt
