// The training data: tokens in files, read where they are needed, and the sequences drawn from them. A token is a byte
// of any file, or an id of 16 or 32 bits as nanoGPT and llm.c write them. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace ballast::gpt {

enum class TokenType : std::uint8_t { u8, u16, u32 };  // little-endian
std::string to_string(TokenType type);

// Files open for reading; their tokens stay in them. Any thread. Positions count the tokens of all files in turn.
class TokenData {
 public:
  // Of each file the tokens before its last `held_out` part, or those of that part: a validation split.
  struct Part {
    double held_out = 0;  // from 0 up to, not including, 1
    bool of_held_out = false;
  };
  // The bytes of one file.
  static std::shared_ptr<const TokenData> open(const std::string& path);
  // Without a type: u16 or u32 where the files begin with llm.c's header for them, u8 otherwise. Throws ConfigError
  // where a path is missing, unreadable, empty or not a regular file, where a header contradicts its file, and where
  // files are of several kinds.
  static std::shared_ptr<const TokenData> open(const std::vector<std::string>& paths, std::optional<TokenType> type,
                                               Part part);
  ~TokenData();
  TokenData(const TokenData&) = delete;
  TokenData& operator=(const TokenData&) = delete;

  std::string path() const;  // of all, with commas between
  TokenType type() const { return type_; }
  std::uint64_t tokens() const;
  // Throws ConfigError naming the file and the numbers where no sequence of that length and its next token fit into it.
  void require_sequence(std::int64_t sequence) const;
  // Reads all tokens. Throws ConfigError naming the file, the position and the id of the first that a vocabulary of so
  // many does not have.
  void require_below(std::int64_t vocabulary) const;
  // Tokens that follow each other in one file. Throws IoError with file and offset, and as require_below where one of
  // them is not below `vocabulary`.
  void read(std::uint64_t position, std::span<std::uint32_t> target, std::int64_t vocabulary) const;

  // Of lengths, parts, and of the bytes at the beginning and the end of each file.
  std::uint64_t fingerprint() const;

  // Where the row-th sequence of batch `index` begins: a pure function of all arguments. With its next token it never
  // crosses from one file into the next; every place where it fits is as likely as any other.
  std::uint64_t sequence_offset(std::uint64_t seed, std::uint64_t index, std::uint64_t row,
                                std::int64_t sequence) const;

 private:
  struct File;
  TokenData(std::vector<std::unique_ptr<File>> files, TokenType type);
  void read_part(const File& file, std::uint64_t first, std::span<std::uint32_t> target, std::int64_t vocabulary) const;

  std::vector<std::unique_ptr<File>> files_;
  TokenType type_;
};

}  // namespace ballast::gpt
