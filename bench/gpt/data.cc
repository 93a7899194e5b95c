// The training data, read with pread: no copy of a file is held, and one cut short later is an error, not a signal.
// SPDX-License-Identifier: Apache-2.0
#include "data.h"

#include <ballast/base/error.h>
#include <ballast/base/random.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

namespace ballast::gpt {
namespace {

std::string text(std::uint64_t value) { return std::to_string(value); }

// Raw values at the end of the target are widened from its beginning: what is written lies before all that is still to
// be read. Returns the largest.
template <typename Raw>
std::uint32_t widen(std::span<std::uint32_t> target) {
  const std::byte* raw = std::as_bytes(target).last(target.size() * sizeof(Raw)).data();
  std::uint32_t largest = 0;
  for (std::uint32_t& id : target) {
    Raw value = 0;
    std::memcpy(&value, raw, sizeof value);
    raw += sizeof value;
    id = value;
    largest = std::max(largest, id);
  }
  return largest;
}

constexpr std::uint64_t width_of(TokenType type) { return type == TokenType::u8 ? 1 : type == TokenType::u16 ? 2 : 4; }

// llm.c begins its files with 256 numbers of 32 bits: which tokens these are, the version of the format, how many.
constexpr std::uint64_t kHeaderBytes = 1024;
struct Header {
  TokenType type;
  std::uint32_t magic, version;
};
constexpr Header kHeaders[] = {{TokenType::u16, 20240520, 1}, {TokenType::u32, 20240801, 7}};

const char* unit_of(TokenType type) { return type == TokenType::u8 ? "byte" : "token"; }

}  // namespace

std::string to_string(TokenType type) { return type == TokenType::u8 ? "u8" : type == TokenType::u16 ? "u16" : "u32"; }

struct TokenData::File {
  explicit File(const std::string& name) : path(name) {
    // O_NONBLOCK: a pipe without a writer must be refused below, not waited for.
    descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0) throw ConfigError(path + ": the data file cannot be opened: " + std::strerror(errno));
    try {
      struct stat status {};
      if (::fstat(descriptor, &status) != 0)
        throw ConfigError(path + ": the data file cannot be examined: " + std::strerror(errno));
      if (!S_ISREG(status.st_mode)) throw ConfigError(path + ": the data must be a regular file");
      if (status.st_size == 0) throw ConfigError(path + ": the data file is empty");
      bytes = static_cast<std::uint64_t>(status.st_size);
      if (bytes >= kHeaderBytes) {
        std::array<std::uint32_t, 3> head{};
        read(0, std::as_writable_bytes(std::span(head)));
        for (const Header& each : kHeaders) {
          if (each.magic != head[0]) continue;
          header = &each;
          version = head[1];
          stated_tokens = head[2];
        }
      }
    } catch (...) {
      ::close(descriptor);
      throw;
    }
  }
  ~File() { ::close(descriptor); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  void read(std::uint64_t offset, std::span<std::byte> target) const {
    std::size_t done = 0;
    while (done < target.size()) {
      const ssize_t got =
          ::pread(descriptor, target.data() + done, target.size() - done, static_cast<off_t>(offset + done));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) {
        throw IoError(path + ": reading " + text(target.size() - done) + " bytes at offset " + text(offset + done) +
                      " failed: " + (got < 0 ? std::strerror(errno) : "the file became shorter while it was in use"));
      }
      done += static_cast<std::size_t>(got);
    }
  }

  // Whether it is what llm.c would have written, to the byte.
  bool has_whole_header() const {
    return header != nullptr && version == header->version &&
           bytes == kHeaderBytes + stated_tokens * width_of(header->type);
  }

  // Says where its tokens lie. Throws ConfigError.
  void take(TokenType type, const Part& part) {
    const std::uint64_t width = width_of(type);
    const bool headed = header != nullptr && header->type == type;
    if (headed && version != header->version) {
      throw ConfigError(path + ": its header (" + text(header->magic) + ") is of version " + text(version) +
                        ", and this build reads version " + text(header->version));
    }
    if (headed && !has_whole_header()) {
      throw ConfigError(path + ": its header says " + text(stated_tokens) + " tokens of " + text(width) +
                        " bytes, and " + text(bytes - kHeaderBytes) + " bytes follow it; the file is not whole");
    }
    data_begin = headed ? kHeaderBytes : 0;
    if ((bytes - data_begin) % width != 0) {
      throw ConfigError(path + ": " + text(bytes) + " bytes are no whole number of tokens of " + text(width) +
                        " bytes; is --tokens " + to_string(type) + " right?");
    }
    const std::uint64_t all = (bytes - data_begin) / width;
    const auto held = static_cast<std::uint64_t>(std::floor(part.held_out * static_cast<double>(all)));
    first = part.of_held_out ? all - held : 0;
    count = part.of_held_out ? held : all - held;
    whole = count == all;
  }

  std::string path;
  int descriptor = -1;
  std::uint64_t bytes = 0;
  const Header* header = nullptr;
  std::uint64_t version = 0, stated_tokens = 0;
  std::uint64_t data_begin = 0, first = 0, count = 0;  // the first in bytes, the others in tokens
  bool whole = true;
};

std::shared_ptr<const TokenData> TokenData::open(const std::string& path) { return open({path}, TokenType::u8, {}); }

std::shared_ptr<const TokenData> TokenData::open(const std::vector<std::string>& paths, std::optional<TokenType> type,
                                                 Part part) {
  std::vector<std::unique_ptr<File>> files;
  for (const std::string& path : paths) files.push_back(std::make_unique<File>(path));
  if (files.empty()) throw ConfigError("no data file is named");
  const auto kind = [](const File& file) { return file.has_whole_header() ? file.header->type : TokenType::u8; };
  const TokenType common = type.value_or(kind(*files.front()));
  for (const auto& file : files) {
    if (!type && kind(*file) != common) {
      throw ConfigError(file->path + " holds tokens of kind " + to_string(kind(*file)) + " and " + files.front()->path +
                        " of kind " + to_string(common) +
                        ", by their headers; name files of one kind, or say --tokens");
    }
    file->take(common, part);
  }
  return std::shared_ptr<const TokenData>(new TokenData(std::move(files), common));
}

TokenData::TokenData(std::vector<std::unique_ptr<File>> files, TokenType type)
    : files_(std::move(files)), type_(type) {}

TokenData::~TokenData() = default;

std::string TokenData::path() const {
  std::string all;
  for (const auto& file : files_) all += (all.empty() ? "" : ",") + file->path;
  return all;
}

std::uint64_t TokenData::tokens() const {
  std::uint64_t all = 0;
  for (const auto& file : files_) all += file->count;
  return all;
}

void TokenData::require_sequence(std::int64_t sequence) const {
  const std::string unit = unit_of(type_);
  for (const auto& file : files_) {
    if (file->count >= static_cast<std::uint64_t>(sequence) + 1) continue;
    const std::string of_split = file->whole ? "" : " of its split";
    throw ConfigError(file->path + ": " + text(file->count) + " " + unit + "s" + of_split +
                      " are too few for a sequence of " + std::to_string(sequence) + " and the " + unit +
                      " after it; take a longer text" +
                      (file->count > 1 ? " or --sequence " + text(file->count - 1) + " or less" : std::string()));
  }
}

void TokenData::read_part(const File& file, std::uint64_t first, std::span<std::uint32_t> target,
                          std::int64_t vocabulary) const {
  const std::uint64_t width = width_of(type_);
  file.read(file.data_begin + (file.first + first) * width, std::as_writable_bytes(target).last(target.size() * width));
  const auto limit = static_cast<std::uint64_t>(vocabulary);
  const std::uint32_t largest = type_ == TokenType::u8    ? widen<std::uint8_t>(target)
                                : type_ == TokenType::u16 ? widen<std::uint16_t>(target)
                                                          : widen<std::uint32_t>(target);
  if (largest < limit) return;
  const auto wrong = std::find_if(target.begin(), target.end(), [&](std::uint32_t id) { return id >= limit; });
  throw ConfigError(file.path + ": token " +
                    text(file.first + first + static_cast<std::uint64_t>(wrong - target.begin())) +
                    " (counted from 0) is " + text(*wrong) + ", and the model's vocabulary of " + text(limit) +
                    " ends at " + text(limit - 1) + "; is --tokens " + to_string(type_) + " right?");
}

void TokenData::require_below(std::int64_t vocabulary) const {
  if (width_of(type_) < 4 && vocabulary >> (8 * width_of(type_)) > 0) return;  // every id is
  std::vector<std::uint32_t> part(std::size_t{1} << 18);
  for (const auto& file : files_) {
    for (std::uint64_t first = 0; first < file->count; first += part.size()) {
      read_part(*file, first, std::span(part).first(std::min<std::uint64_t>(part.size(), file->count - first)),
                vocabulary);
    }
  }
}

void TokenData::read(std::uint64_t position, std::span<std::uint32_t> target, std::int64_t vocabulary) const {
  for (const auto& file : files_) {
    if (position < file->count) return read_part(*file, position, target, vocabulary);
    position -= file->count;
  }
  throw UsageError("a position behind the last token");
}

std::uint64_t TokenData::fingerprint() const {
  std::uint64_t all = 0;
  for (const auto& file : files_) {
    std::uint64_t hash = base::mix(file->bytes);
    std::vector<std::byte> part(static_cast<std::size_t>(std::min<std::uint64_t>(file->bytes, 64 << 10)));
    for (const std::uint64_t offset : {std::uint64_t{0}, file->bytes - part.size()}) {
      file->read(offset, part);
      for (const std::byte byte : part) hash = base::mix(hash + std::to_integer<std::uint64_t>(byte));
    }
    if (!file->whole) hash = base::mix(base::mix(hash + file->first) + file->count);
    all = &file == &files_.front() ? hash : base::mix(all + hash);
  }
  return type_ == TokenType::u8 ? all : base::mix(all + width_of(type_));
}

std::uint64_t TokenData::sequence_offset(std::uint64_t seed, std::uint64_t index, std::uint64_t row,
                                         std::int64_t sequence) const {
  const auto length = static_cast<std::uint64_t>(sequence);
  std::uint64_t starts = 0;
  for (const auto& file : files_) starts += file->count - length;
  std::uint64_t start = base::random_at(base::random_at(seed, index), row) % starts, position = 0;
  for (const auto& file : files_) {
    if (start < file->count - length) break;
    start -= file->count - length;
    position += file->count;
  }
  return position + start;
}

}  // namespace ballast::gpt
