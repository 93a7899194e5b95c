// Output that is whole or absent.
// SPDX-License-Identifier: Apache-2.0
#include "output_file.h"

#include <ballast/base/error.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace ballast::cli {
namespace {

std::string reason() { return std::strerror(errno); }

// False, with errno, where not all of it could be written.
bool write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(descriptor, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return true;
}

// Removes a line without an end, left by a process that was killed within a write. Pipes and terminals are left alone.
void cut_torn_line(int descriptor, const std::string& path) {
  struct stat status {};
  if (::fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) return;
  off_t end = status.st_size;
  char buffer[4096];
  while (end > 0) {
    const off_t begin = end > static_cast<off_t>(sizeof buffer) ? end - static_cast<off_t>(sizeof buffer) : 0;
    const ssize_t count = ::pread(descriptor, buffer, static_cast<std::size_t>(end - begin), begin);
    if (count != end - begin) throw ConfigError("cannot read the log " + path + ": " + reason());
    const void* newline = ::memrchr(buffer, '\n', static_cast<std::size_t>(count));
    if (newline != nullptr) {
      end = begin + (static_cast<const char*>(newline) - buffer) + 1;
      break;
    }
    end = begin;
  }
  if (end != status.st_size && ::ftruncate(descriptor, end) != 0)
    throw ConfigError("cannot cut the torn last line of " + path + ": " + reason());
}

// What a path leads to, whether or not anything is there. Empty for a pipe, a device or an open descriptor.
std::filesystem::path place_of(const std::string& path) {
  if (own_descriptor(path) >= 0) return {};
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (std::filesystem::is_other(status) || std::filesystem::is_character_file(status) ||
      std::filesystem::is_fifo(status) || std::filesystem::is_socket(status))
    return {};
  const std::size_t length = path.find_last_not_of('/') + 1;
  const auto place = std::filesystem::weakly_canonical(length > 0 ? path.substr(0, length) : path, error);
  return error ? std::filesystem::path() : place;
}

}  // namespace

void require_distinct(const NamedPaths& outputs, const NamedPaths& others) {
  std::vector<std::pair<std::string, std::filesystem::path>> seen;
  for (const auto& [option, path] : others) seen.emplace_back(option, place_of(path));
  for (const auto& [option, path] : outputs) {
    if (path.empty()) continue;
    const std::filesystem::path place = place_of(path);
    for (const auto& [other, other_place] : seen) {
      std::error_code ignored;
      if (place.empty() || (place != other_place && !std::filesystem::equivalent(place, other_place, ignored)))
        continue;
      throw ConfigError(option + " " + path + " is also what " + other + " names; give each a file of its own");
    }
    seen.emplace_back(option, place);
  }
}

int own_descriptor(const std::string& path) {
  struct stat status {};
  if (path.empty() || ::stat(path.c_str(), &status) != 0) return -1;
  for (const int standard : {STDOUT_FILENO, STDERR_FILENO}) {
    struct stat its {};
    if (S_ISREG(status.st_mode) && ::fstat(standard, &its) == 0 && its.st_dev == status.st_dev &&
        its.st_ino == status.st_ino)
      return standard;
  }
  const std::filesystem::path ours = "/proc/" + std::to_string(::getpid()) + "/fd";
  std::filesystem::path at = std::filesystem::absolute(path);
  for (int links = 0; links < 40; ++links) {
    std::error_code error;
    const std::filesystem::path folder = std::filesystem::canonical(at.parent_path(), error);
    if (error) return -1;
    if (folder == ours) {
      const std::string name = at.filename();
      int number = -1;
      const auto end = std::from_chars(name.data(), name.data() + name.size(), number).ptr;
      return end == name.data() + name.size() ? number : -1;
    }
    const std::filesystem::path target = std::filesystem::read_symlink(at, error);
    if (error) return -1;
    at = target.is_absolute() ? target : folder / target;
  }
  return -1;
}

OutputFile::OutputFile(std::string path) : path_(std::move(path)) {
  if (path_.empty()) return;
  if (const int own = own_descriptor(path_); own >= 0) {
    descriptor_ = ::fcntl(own, F_DUPFD_CLOEXEC, 0);
    if (descriptor_ < 0) throw ConfigError("cannot write " + path_ + ": " + reason());
    if ((::fcntl(descriptor_, F_GETFL) & O_ACCMODE) == O_RDONLY) {
      ::close(descriptor_);
      throw ConfigError("cannot write " + path_ + ": it is open for reading only");
    }
    temporary_ = (std::filesystem::temp_directory_path() / "ballast-output-XXXXXX").string();
    const int made = ::mkostemp(temporary_.data(), O_CLOEXEC);
    if (made < 0) {
      const std::string why = reason();
      ::close(descriptor_);
      throw ConfigError("cannot write " + temporary_ + " on the way to " + path_ + ": " + why);
    }
    ::close(made);
    return;
  }
  struct stat status {};
  const bool there = ::stat(path_.c_str(), &status) == 0;
  if (there && S_ISDIR(status.st_mode)) throw ConfigError("cannot write " + path_ + ": it is a directory");
  if (there && !S_ISREG(status.st_mode)) {
    temporary_ = path_;
    return;
  }
  std::error_code ignored;
  if (there && std::filesystem::is_symlink(path_, ignored)) path_ = std::filesystem::canonical(path_);
  temporary_ = path_ + ".partial-" + std::to_string(::getpid());
  const int descriptor = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor < 0) throw ConfigError("cannot write " + path_ + ": " + reason());
  ::close(descriptor);
}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (wanted() && !in_place() && (!published_ || descriptor_ >= 0)) ::unlink(temporary_.c_str());
}

void OutputFile::publish() {
  if (!wanted()) return;
  if (descriptor_ >= 0) {
    std::ifstream whole(temporary_, std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(whole)), std::istreambuf_iterator<char>());
    if (!whole) throw IoError("cannot read " + temporary_ + " on the way to " + path_);
    publish(text);
    return;
  }
  if (!in_place() && ::rename(temporary_.c_str(), path_.c_str()) != 0)
    throw IoError("cannot rename " + temporary_ + " to " + path_ + ": " + reason());
  published_ = true;
}

void OutputFile::publish(std::string_view text) {
  if (!wanted()) return;
  if (descriptor_ >= 0) {
    std::fflush(stdout);  // in the order of writing, where both go to one place
    if (!write_all(descriptor_, text)) throw IoError("cannot write " + path_ + ": " + reason());
    published_ = true;
    return;
  }
  const int descriptor = ::open(temporary_.c_str(), O_WRONLY | O_CLOEXEC | (in_place() ? 0 : O_TRUNC));
  if (descriptor < 0) throw IoError("cannot write " + temporary_ + ": " + reason());
  const bool written = write_all(descriptor, text);
  const std::string why = written ? "" : reason();
  const bool closed = ::close(descriptor) == 0;
  if (!written || !closed) throw IoError("cannot write " + temporary_ + ": " + (written ? reason() : why));
  publish();
}

LineLog::LineLog(std::string path) : path_(std::move(path)) {
  if (path_.empty()) return;
  if (const int own = own_descriptor(path_); own >= 0) {
    descriptor_ = ::fcntl(own, F_DUPFD_CLOEXEC, 0);
    if (descriptor_ < 0) throw ConfigError("cannot append to the log " + path_ + ": " + reason());
    shared_ = true;
    return;
  }
  made_ = ::access(path_.c_str(), F_OK) != 0;
  descriptor_ = ::open(path_.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
  if (descriptor_ < 0 && (errno == EACCES || errno == ENXIO || errno == EINVAL))
    descriptor_ = ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
  if (descriptor_ < 0) throw ConfigError("cannot append to the log " + path_ + ": " + reason());
  try {
    cut_torn_line(descriptor_, path_);
  } catch (...) {
    ::close(descriptor_);
    throw;
  }
}

LineLog::~LineLog() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  if (made_ && !written_) ::unlink(path_.c_str());
}

void LineLog::append(std::string_view line) {
  if (descriptor_ < 0) return;
  written_ = true;
  if (shared_) std::fflush(stdout);
  if (!write_all(descriptor_, std::string(line) + "\n"))
    throw IoError("cannot append to the log " + path_ + ": " + reason());
}

}  // namespace ballast::cli
