// Opening, locking, probing and reserving one chunk file.
// SPDX-License-Identifier: Apache-2.0
#include "chunk_file.h"

#include <ballast/base/error.h>
#include <ballast/base/size.h>
#include <ballast/io/directories.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include "errno_text.h"
#include "file_alignment.h"

namespace ballast::io {
namespace {

constexpr std::uint64_t kMostAlignmentBytes = 64 << 10;

// All of it, whatever the calls return. 0 or an errno; ENODATA at the end of the file.
int read_fully(int descriptor, std::byte* data, std::uint64_t bytes, std::uint64_t offset) {
  while (bytes > 0) {
    const ssize_t count = ::pread(descriptor, data, bytes, static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno;
    if (count == 0) return ENODATA;
    data += count;
    offset += static_cast<std::uint64_t>(count);
    bytes -= static_cast<std::uint64_t>(count);
  }
  return 0;
}

int write_fully(int descriptor, const std::byte* data, std::uint64_t bytes, std::uint64_t offset) {
  while (bytes > 0) {
    const ssize_t count = ::pwrite(descriptor, data, bytes, static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno;
    if (count == 0) return EIO;
    data += count;
    offset += static_cast<std::uint64_t>(count);
    bytes -= static_cast<std::uint64_t>(count);
  }
  return 0;
}

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using AlignedBytes = std::unique_ptr<std::byte[], Free>;

AlignedBytes aligned_bytes(std::uint64_t alignment, std::uint64_t bytes) {
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(alignment, bytes));
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0, bytes);
  return AlignedBytes(memory);
}

// A file that would grow beyond its limit ends the process with a signal: refused before.
void check_size_limit(const std::string& path, std::uint64_t bytes) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur) return;
  throw IoError("chunk file " + path + " of " + base::format_size(bytes) + " is larger than this process may write, " +
                base::format_size(limit.rlim_cur) + "; raise the limit on the size of files (ulimit -f)");
}

std::string directory_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, std::max<std::size_t>(slash, 1));
}

}  // namespace

ChunkFile::ChunkFile(std::string path, int lock_wait_ms) : path_(std::move(path)) {
  try {
    open_and_lock(lock_wait_ms);
    read_old_header();
  } catch (...) {
    guard_.release();
    if (descriptor_ >= 0) ::close(descriptor_);
    throw;
  }
}

ChunkFile::~ChunkFile() {
  if (descriptor_ < 0 || !guard_.owned_here()) return;
  // Removed while locked, so that whoever waits for the lock sees that its file is gone.
  if (!keep_ && is_still_at_path()) ::unlink(path_.c_str());
  ::flock(descriptor_, LOCK_UN);  // at once, even where something still refers to the open file
  guard_.release();
  ::close(descriptor_);
}

void ChunkFile::open_and_lock(int lock_wait_ms) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(std::max(lock_wait_ms, 0));
  for (int vanished = 0;;) {
    int error_number = 0;
    guard_.open([&] {
      made_ = true;
      descriptor_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOCTTY, 0644);
      if (descriptor_ < 0 && errno == EEXIST) {
        made_ = false;
        descriptor_ = ::open(path_.c_str(), O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
      }
      error_number = errno;
      return descriptor_;
    });
    if (descriptor_ < 0) {
      // Removed between the two opens; but some directories (/proc) take no file and say the same for ever.
      if (error_number == ENOENT && ++vanished < 100 && ::access(directory_of(path_).c_str(), F_OK) == 0) continue;
      throw_path_error(error_number, "chunk file " + path_ + " cannot be opened: " + errno_text(error_number) +
                                         (error_number == EMFILE ? "; raise the limit on open files (ulimit -n)" : ""));
    }
    struct stat status;
    if (::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
      throw UnusablePath("chunk file " + path_ + " is not a regular file; remove it or name another directory");
    }
    while (!try_lock()) {
      if (std::chrono::steady_clock::now() >= deadline) {
        read_old_header();
        std::string holder = "another process";
        if (has_old_header_ && old_header_.owner_process != 0) {
          holder = old_header_.owner_process == static_cast<std::uint64_t>(::getpid())
                       ? "this process itself (pid " + std::to_string(::getpid()) + ", another engine)"
                       : "process " + std::to_string(old_header_.owner_process);
        }
        throw IoError("chunk file " + path_ + " is in use by " + holder + "; waited " + std::to_string(lock_wait_ms) +
                      " ms. Let it end, or give each engine a directory of its own");
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    if (is_still_at_path()) return;
    // Whoever held it has removed it meanwhile: what we locked has no name any more.
    guard_.release();
    ::close(descriptor_);
    descriptor_ = -1;
  }
}

bool ChunkFile::try_lock() {
  // On the open file that transfers go through: while the kernel still writes for a killed process, it stays locked.
  while (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) return false;
    if (errno == EINTR) continue;
    const int error = errno;
    if (made_) ::unlink(path_.c_str());
    throw UnusablePath("chunk file " + path_ + " cannot be locked: " + errno_text(error) +
                       "; name a directory on a file system with locks (flock)");
  }
  return true;
}

bool ChunkFile::is_still_at_path() const {
  struct stat here, there;
  return ::fstat(descriptor_, &here) == 0 && ::stat(path_.c_str(), &there) == 0 && here.st_dev == there.st_dev &&
         here.st_ino == there.st_ino;
}

void ChunkFile::read_old_header() {
  has_old_header_ = false;
  old_header_problem_.clear();
  HeaderBlock block;
  struct stat status;
  if (::fstat(descriptor_, &status) != 0 || status.st_size == 0) return;
  const auto bytes = std::min<std::uint64_t>(block.size(), static_cast<std::uint64_t>(status.st_size));
  if (const int error = read_fully(descriptor_, block.data(), bytes, 0); error != 0) {
    old_header_problem_ = "it cannot be read: " + errno_text(error);
    return;
  }
  has_old_header_ = decode_header(std::span(block).first(bytes), &old_header_, &old_header_problem_);
}

std::uint64_t ChunkFile::occupied_bytes() const {
  struct stat status;
  return ::fstat(descriptor_, &status) == 0 ? static_cast<std::uint64_t>(status.st_blocks) * 512 : 0;
}

// EINVAL is how file systems and devices say that they want another alignment, or no direct I/O at all.
bool ChunkFile::write_and_compare(const HeaderBlock& block, std::uint64_t alignment) {
  const std::uint64_t bytes = std::max<std::uint64_t>(alignment, block.size());
  check_size_limit(path_, bytes);
  const AlignedBytes memory = aligned_bytes(alignment, bytes);
  std::memcpy(memory.get(), block.data(), block.size());
  if (const int error = write_fully(descriptor_, memory.get(), bytes, 0); error != 0) {
    if (error == EINVAL || error == EOPNOTSUPP) return false;
    throw IoError("chunk file " + path_ + " cannot be written: " + errno_text(error));
  }
  std::memset(memory.get(), 0xff, bytes);
  if (const int error = read_fully(descriptor_, memory.get(), bytes, 0); error != 0) {
    if (error == EINVAL || error == EOPNOTSUPP) return false;
    throw IoError("chunk file " + path_ + " cannot be read back: " + errno_text(error));
  }
  return std::memcmp(memory.get(), block.data(), block.size()) == 0;
}

void ChunkFile::choose_mode(const HeaderBlock& block, std::string* reason) {
  const int flags = ::fcntl(descriptor_, F_GETFL);
  if (flags < 0) throw IoError("chunk file " + path_ + ": " + errno_text(errno));
  direct_ = false;
  alignment_bytes_ = kUsualAlignmentBytes;
  struct statfs system = {};
  if (::fstatfs(descriptor_, &system) == 0 && (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC)) {
    // Newer kernels take direct requests there too, and copy all the same.
    *reason = "it is in memory, not on a drive: what is stored there counts as memory";
  } else if (::fcntl(descriptor_, F_SETFL, flags | O_DIRECT) != 0) {
    *reason = errno_text(errno);
  } else {
    for (std::uint64_t alignment = std::max(stated_alignment_bytes(descriptor_), kUsualAlignmentBytes);
         alignment <= kMostAlignmentBytes; alignment *= 2) {
      if (write_and_compare(block, alignment)) {
        direct_ = true;
        alignment_bytes_ = alignment;
        return;
      }
    }
    *reason = "a direct write and read did not work at any alignment";
    if (::fcntl(descriptor_, F_SETFL, flags & ~O_DIRECT) != 0)
      throw IoError("chunk file " + path_ + ": " + errno_text(errno));
  }
  if (!write_and_compare(block, alignment_bytes_))
    throw IoError("chunk file " + path_ + " does not hold what is written to it");
}

void ChunkFile::reserve(std::uint64_t bytes, bool fresh, const Note& note) {
  check_size_limit(path_, bytes);
  if (fresh && ::ftruncate(descriptor_, 0) != 0) {
    throw IoError("chunk file " + path_ + " cannot be emptied: " + errno_text(errno));
  }
  int result;
  do {
    result = ::fallocate(descriptor_, 0, 0, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  const int error = result == 0 ? 0 : errno;
  if (error == EOPNOTSUPP || error == ENOSYS) {
    note("space for " + path_ +
         " cannot be reserved ahead on this file system; a disk that fills up later will stop the run");
  } else if (error == EFBIG) {
    throw IoError("chunk file " + path_ + " of " + base::format_size(bytes) +
                  " is larger than its file system allows; name a path on another one, or more paths");
  } else if (error == ENOSPC || error == EDQUOT) {
    throw IoError("not enough space in " + directory_of(path_) + " for " + path_ + ": wanted " +
                  base::format_size(bytes) + ", free " + base::format_size(free_bytes(directory_of(path_))) + " (" +
                  errno_text(error) + "); free some, name another path, or lower what is stored");
  } else if (error != 0) {
    throw IoError("space for " + path_ + " cannot be reserved: " + errno_text(error));
  }
  if (::ftruncate(descriptor_, static_cast<off_t>(bytes)) != 0) {
    throw IoError("chunk file " + path_ + " cannot get its length: " + errno_text(errno));
  }
}

void ChunkFile::write_header(const ChunkFileHeader& header) {
  if (!write_and_compare(encode_header(header), alignment_bytes_)) {
    throw IoError("chunk file " + path_ + ": its header could not be written and read back");
  }
}

}  // namespace ballast::io
