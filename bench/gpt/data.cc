// The training text, read with pread: no copy of the file is held, and a file cut short later is an error, not a
// signal. SPDX-License-Identifier: Apache-2.0
#include "data.h"

#include <ballast/base/error.h>
#include <ballast/base/random.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

namespace ballast::gpt {

std::shared_ptr<const ByteData> ByteData::open(const std::string& path) {
  // O_NONBLOCK: a pipe without a writer must be refused below, not waited for.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) throw ConfigError(path + ": the data file cannot be opened: " + std::strerror(errno));
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) {
    const int error = errno;
    ::close(descriptor);
    throw ConfigError(path + ": the data file cannot be examined: " + std::strerror(error));
  }
  if (!S_ISREG(status.st_mode)) {
    ::close(descriptor);
    throw ConfigError(path + ": the data must be a regular file");
  }
  if (status.st_size == 0) {
    ::close(descriptor);
    throw ConfigError(path + ": the data file is empty");
  }
  return std::shared_ptr<const ByteData>(new ByteData(path, descriptor, static_cast<std::uint64_t>(status.st_size)));
}

ByteData::ByteData(std::string path, int descriptor, std::uint64_t bytes)
    : path_(std::move(path)), descriptor_(descriptor), bytes_(bytes) {}

ByteData::~ByteData() { ::close(descriptor_); }

void ByteData::require_sequence(std::int64_t sequence) const {
  if (bytes_ < static_cast<std::uint64_t>(sequence) + 1) {
    throw ConfigError(path_ + ": " + std::to_string(bytes_) + " bytes are too few for a sequence of " +
                      std::to_string(sequence) + " and the byte after it; take a longer text" +
                      (bytes_ > 1 ? " or --sequence " + std::to_string(bytes_ - 1) + " or less" : std::string()));
  }
}

void ByteData::read(std::uint64_t offset, std::span<std::uint8_t> target) const {
  std::size_t done = 0;
  while (done < target.size()) {
    const ssize_t got =
        ::pread(descriptor_, target.data() + done, target.size() - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      throw IoError(path_ + ": reading " + std::to_string(target.size() - done) + " bytes at offset " +
                    std::to_string(offset + done) +
                    " failed: " + (got < 0 ? std::strerror(errno) : "the file became shorter while it was in use"));
    }
    done += static_cast<std::size_t>(got);
  }
}

std::uint64_t ByteData::fingerprint() const {
  std::uint64_t hash = base::mix(bytes_);
  std::vector<std::uint8_t> part(static_cast<std::size_t>(std::min<std::uint64_t>(bytes_, 64 << 10)));
  for (const std::uint64_t offset : {std::uint64_t{0}, bytes_ - part.size()}) {
    read(offset, part);
    for (const std::uint8_t byte : part) hash = base::mix(hash + byte);
  }
  return hash;
}

std::uint64_t ByteData::sequence_offset(std::uint64_t seed, std::uint64_t index, std::uint64_t row,
                                        std::int64_t sequence) const {
  const std::uint64_t starts = bytes_ - static_cast<std::uint64_t>(sequence);
  return base::random_at(base::random_at(seed, index), row) % starts;
}

}  // namespace ballast::gpt
