// Files for safetensors.
// SPDX-License-Identifier: Apache-2.0
#include "safetensors/files.h"

#include <ballast/base/error.h>
#include <ballast/base/size.h>
#include <ballast/io/directories.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace ballast::engine {

InputFile::InputFile(std::string path) : path_(std::move(path)) {
  // Not blocking: a pipe without a writer must not hold us.
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
  if (descriptor_ < 0) throw IoError(path_ + " cannot be opened: " + std::strerror(errno));
  struct stat status;
  const int done = ::fstat(descriptor_, &status);
  if (done != 0 || !S_ISREG(status.st_mode)) {
    const int error = errno;
    ::close(descriptor_);
    throw IoError(path_ +
                  (done != 0 ? std::string(" cannot be read: ") + std::strerror(error) : " is no regular file"));
  }
  bytes_ = static_cast<std::uint64_t>(status.st_size);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)), bytes_(other.bytes_) {}

InputFile::~InputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void InputFile::read(std::uint64_t offset_bytes, void* data, std::uint64_t bytes) const {
  auto* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t count = ::pread(descriptor_, to, std::min<std::uint64_t>(bytes, std::uint64_t{1} << 30),
                                  static_cast<off_t>(offset_bytes));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      throw IoError(path_ + " at " + std::to_string(offset_bytes) + " cannot be read: " + std::strerror(errno));
    }
    if (count == 0) {
      throw CorruptionError(path_ + " had " + std::to_string(bytes_) + " bytes and now ends before byte " +
                            std::to_string(offset_bytes));
    }
    to += count;
    offset_bytes += static_cast<std::uint64_t>(count);
    bytes -= static_cast<std::uint64_t>(count);
  }
}

WholeFile::WholeFile(const std::string& folder, const std::string& name, std::uint64_t bytes)
    : path_(folder + "/" + name), temporary_(path_ + ".new") {
  ::unlink(temporary_.c_str());  // of one that was interrupted; what it takes is free again
  const std::uint64_t free = io::free_bytes(folder);
  if (bytes > free) {
    throw IoError("not enough space in " + folder + " for " + path_ + ": wanted " + base::format_size(bytes) +
                  ", free " + base::format_size(free) + "; free some, or name another folder");
  }
  // A file that would grow beyond its limit ends the process with a signal.
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && bytes > limit.rlim_cur) {
    throw IoError(path_ + " of " + base::format_size(bytes) + " is larger than this process may write, " +
                  base::format_size(limit.rlim_cur) + "; raise the limit on the size of files (ulimit -f)");
  }
  descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOCTTY, 0644);
  if (descriptor_ < 0) fail("cannot be made");
}

WholeFile::~WholeFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(temporary_.c_str());
}

void WholeFile::write(const void* data, std::size_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t count = ::write(descriptor_, from, std::min(bytes, std::size_t{1} << 30));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("cannot be written", bytes);
    from += count;
    bytes -= static_cast<std::size_t>(count);
  }
}

void WholeFile::publish() {
  if (::fsync(descriptor_) != 0) fail("cannot be made durable");
  const int closed = ::close(std::exchange(descriptor_, -1));
  if (closed == 0 && std::rename(temporary_.c_str(), path_.c_str()) == 0) return;
  const int error = errno;
  ::unlink(temporary_.c_str());
  errno = error;
  fail("cannot be put in place");
}

void WholeFile::fail(const char* what, std::size_t wanted_bytes) const {
  const int error = errno;
  std::string text = path_ + " " + what + ": " + std::strerror(error);
  if (error == ENOSPC || error == EDQUOT) text += "; " + io::space_text(path_, wanted_bytes);
  throw IoError(text);
}

}  // namespace ballast::engine
