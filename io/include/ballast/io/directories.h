// MadeDirectories: directories that exist because of us, so that they can go again.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ballast::io {

class MadeDirectories {
 public:
  MadeDirectories() = default;
  MadeDirectories(const MadeDirectories&) = delete;
  MadeDirectories& operator=(const MadeDirectories&) = delete;

  // Makes `path` and its missing parents. Throws IoError that names the path and why; what this call made is recorded
  // even then.
  void make(const std::string& path);
  // Removes those that are empty, innermost first. Never fails.
  void remove_empty() noexcept;

 private:
  std::vector<std::string> made_;
};

// Bytes that an unprivileged writer can still get in the file system of `path`. Throws IoError.
std::uint64_t free_bytes(const std::string& path);

}  // namespace ballast::io
