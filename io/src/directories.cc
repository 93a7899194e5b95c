// Making and removing directories, and asking for their free space.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/base/size.h>
#include <ballast/io/directories.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "errno_text.h"

namespace ballast::io {

void throw_path_error(int error_number, const std::string& text) {
  switch (error_number) {
    case EACCES:
    case EPERM:
    case EROFS:
    case ENOENT:
    case ENOTDIR:
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
      throw UnusablePath(text + "; name a directory where you may write");
    default:
      throw IoError(text);
  }
}

void MadeDirectories::make(const std::string& path) {
  if (path.empty()) throw UnusablePath("a storage path is empty: name a directory");
  int tries = 0;
  for (std::size_t end = 0; end != std::string::npos;) {
    end = path.find('/', end + 1);
    const std::string part = path.substr(0, end);
    struct stat status;
    if (::stat(part.c_str(), &status) == 0) {
      if (!S_ISDIR(status.st_mode)) {
        throw UnusablePath("storage path " + path + ": " + part + " is a file, not a directory; name another path");
      }
      continue;
    }
    if (const int error = errno; error != ENOENT)
      throw_path_error(error, "storage path " + path + ": " + part + " cannot be looked up: " + errno_text(error));
    made_.reserve(made_.size() + 1);
    if (::mkdir(part.c_str(), 0755) == 0) {
      made_.push_back(part);
    } else if (errno == ENOENT && ++tries < 100) {
      end = 0;  // another rank that had made a part of the path has removed it again: from the beginning
    } else if (const int error = errno; error != EEXIST) {  // another rank may be making it too
      throw_path_error(error, "storage path " + path + ": directory " + part + " cannot be made: " + errno_text(error));
    }
  }
}

void MadeDirectories::remove_empty() noexcept {
  for (; !made_.empty(); made_.pop_back()) ::rmdir(made_.back().c_str());
}

std::uint64_t free_bytes(const std::string& path) {
  struct statvfs status;
  if (::statvfs(path.c_str(), &status) != 0) throw IoError("storage path " + path + ": " + errno_text(errno));
  return static_cast<std::uint64_t>(status.f_bavail) * status.f_frsize;
}

std::string space_text(const std::string& file, std::uint64_t wanted_bytes) {
  const std::size_t slash = file.rfind('/');
  const std::string directory = slash == std::string::npos ? "." : file.substr(0, std::max<std::size_t>(slash, 1));
  std::string text = wanted_bytes > 0 ? "wanted " + base::format_size(wanted_bytes) + ", " : "";
  struct statvfs status;
  if (::statvfs(directory.c_str(), &status) == 0)
    text += base::format_size(static_cast<std::uint64_t>(status.f_bavail) * status.f_frsize) + " are free there; ";
  return text + "free some space";
}

}  // namespace ballast::io
