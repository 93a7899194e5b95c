// Making and removing directories, and asking for their free space.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/io/directories.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "errno_text.h"

namespace ballast::io {

void MadeDirectories::make(const std::string& path) {
  if (path.empty()) throw IoError("a storage path is empty: name a directory");
  int tries = 0;
  for (std::size_t end = 0; end != std::string::npos;) {
    end = path.find('/', end + 1);
    const std::string part = path.substr(0, end);
    struct stat status;
    if (::stat(part.c_str(), &status) == 0) {
      if (!S_ISDIR(status.st_mode)) {
        throw IoError("storage path " + path + ": " + part + " is a file, not a directory; name another path");
      }
      continue;
    }
    if (errno != ENOENT)
      throw IoError("storage path " + path + ": " + part + " cannot be looked up: " + errno_text(errno));
    made_.reserve(made_.size() + 1);
    if (::mkdir(part.c_str(), 0755) == 0) {
      made_.push_back(part);
    } else if (errno == ENOENT && ++tries < 100) {
      end = 0;  // another rank that had made a part of the path has removed it again: from the beginning
    } else if (errno != EEXIST) {  // another rank may be making it too
      throw IoError("storage path " + path + ": directory " + part + " cannot be made: " + errno_text(errno) +
                    "; name a place where you may write");
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

}  // namespace ballast::io
