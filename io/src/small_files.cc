// Small files in a directory of the file system.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/io/directories.h>
#include <ballast/io/small_files.h>
#include <dirent.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "errno_text.h"

namespace ballast::io {
namespace {

// Closed at the end of its scope; close() before that where the result matters.
class Descriptor {
 public:
  explicit Descriptor(int descriptor) : descriptor_(descriptor) {}
  ~Descriptor() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return descriptor_; }
  int close() {
    const int result = ::close(descriptor_) == 0 ? 0 : errno;
    descriptor_ = -1;
    return result;
  }

 private:
  int descriptor_;
};

class DirectoryFiles final : public SmallFiles {
 public:
  explicit DirectoryFiles(std::string directory) : directory_(std::move(directory)) {}

  std::string path(const std::string& name) const override { return directory_ + "/" + name; }

  std::vector<std::string> list() override {
    std::vector<std::string> names;
    DIR* const directory = ::opendir(directory_.c_str());
    if (directory == nullptr) {
      if (errno == ENOENT) return names;
      fail(directory_, "cannot be listed", errno);
    }
    errno = 0;
    while (const dirent* entry = ::readdir(directory)) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
    }
    const int error = errno;
    ::closedir(directory);
    if (error != 0) fail(directory_, "cannot be listed", error);
    std::sort(names.begin(), names.end());
    return names;
  }

  std::vector<std::byte> read(const std::string& name) override {
    const Descriptor file = open(name, O_RDONLY | O_NOCTTY | O_NONBLOCK, "read");
    struct stat status;
    if (::fstat(file.get(), &status) != 0) fail(path(name), "cannot be read", errno);
    if (!S_ISREG(status.st_mode)) fail(path(name), "is not a regular file", 0);
    if (status.st_size > kMostBytes) fail(path(name), "is too large for what it should be", EFBIG);
    std::vector<std::byte> bytes(static_cast<std::size_t>(status.st_size));
    std::size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t count = ::read(file.get(), bytes.data() + done, bytes.size() - done);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) fail(path(name), "cannot be read", errno);
      if (count == 0) break;  // cut meanwhile: the reader finds out
      done += static_cast<std::size_t>(count);
    }
    bytes.resize(done);
    return bytes;
  }

  void write(const std::string& name, std::span<const std::byte> bytes) override {
    // A file that would grow beyond its limit ends the process with a signal: refused before.
    rlimit limit{};
    if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && bytes.size() > limit.rlim_cur) {
      fail(path(name), "is larger than the limit on the size of files (ulimit -f)", EFBIG);
    }
    Descriptor file = open(name, O_WRONLY | O_CREAT | O_TRUNC | O_NOCTTY | O_NONBLOCK, "written");
    while (!bytes.empty()) {
      const ssize_t count = ::write(file.get(), bytes.data(), bytes.size());
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) fail(path(name), "cannot be written", errno, bytes.size());
      bytes = bytes.subspan(static_cast<std::size_t>(count));
    }
    if (const int error = file.close(); error != 0) fail(path(name), "cannot be written", error);
  }

  void flush(const std::string& name) override {
    const Descriptor file = open(name, O_RDONLY | O_NOCTTY, "made durable");
    flush_descriptor(file.get(), path(name));
  }

  void rename(const std::string& from, const std::string& to) override {
    if (::rename(path(from).c_str(), path(to).c_str()) != 0) fail(path(from), "cannot be renamed to " + to, errno);
  }

  void flush_directory() override {
    const Descriptor directory = open("", O_RDONLY | O_DIRECTORY, "made durable");
    flush_descriptor(directory.get(), directory_);
  }

  void remove(const std::string& name) override {
    if (::unlink(path(name).c_str()) != 0 && errno != ENOENT) fail(path(name), "cannot be removed", errno);
  }

 private:
  static constexpr off_t kMostBytes = off_t{1} << 32;

  // wanted_bytes: that had still to be written.
  [[noreturn]] static void fail(const std::string& path, const std::string& what, int error,
                                std::size_t wanted_bytes = 0) {
    std::string text = path + " " + what;
    if (error != 0) text += ": " + errno_text(error);
    if (error == ENOSPC || error == EDQUOT) text += "; " + space_text(path, wanted_bytes);
    throw IoError(text);
  }
  Descriptor open(const std::string& name, int flags, const std::string& purpose) const {
    const std::string whole = name.empty() ? directory_ : path(name);
    int descriptor;
    do {
      descriptor = ::open(whole.c_str(), flags | O_CLOEXEC, 0644);
    } while (descriptor < 0 && errno == EINTR);
    if (descriptor < 0) fail(whole, "cannot be " + purpose, errno);
    return Descriptor(descriptor);
  }
  static void flush_descriptor(int descriptor, const std::string& path) {
    while (::fsync(descriptor) != 0) {
      // Some file systems have no call for directories, whose names they keep at once.
      if (errno == EINVAL || errno == ENOTSUP) return;
      if (errno != EINTR) fail(path, "cannot be made durable", errno);
    }
  }

  const std::string directory_;
};

}  // namespace

std::unique_ptr<SmallFiles> make_small_files(std::string directory) {
  return std::make_unique<DirectoryFiles>(std::move(directory));
}

void publish(SmallFiles& files, const std::string& name, std::span<const std::byte> bytes) {
  const std::string beside = name + kUnpublishedSuffix;
  files.write(beside, bytes);
  files.flush(beside);
  files.rename(beside, name);
  files.flush_directory();
}

}  // namespace ballast::io
