// MadeDirectories: directories that exist because of us, so that they can go again; and paths that cannot be used.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/error.h>

#include <cstdint>
#include <string>
#include <vector>

namespace ballast::io {

// The path that was named cannot be what it is named for: a file in a directory's place, one where nothing may be made
// or written, one too long. Another path is the cure, so a command takes it for wrong usage.
class UnusablePath : public IoError {
 public:
  using IoError::IoError;
};
// Throws that, with the cure, where the errno says so; IoError otherwise.
[[noreturn]] void throw_path_error(int error_number, const std::string& text);

class MadeDirectories {
 public:
  MadeDirectories() = default;
  MadeDirectories(const MadeDirectories&) = delete;
  MadeDirectories& operator=(const MadeDirectories&) = delete;

  // Makes `path` and its missing parents. Throws IoError that names the path and why (UnusablePath where another path
  // is the cure); what this call made is recorded even then.
  void make(const std::string& path);
  // Removes those that are empty, innermost first. Never fails.
  void remove_empty() noexcept;

 private:
  std::vector<std::string> made_;
};

// Bytes that an unprivileged writer can still get in the file system of `path`. Throws IoError.
std::uint64_t free_bytes(const std::string& path);
// For the error of a full file system: "wanted 3 MiB, 12 KiB are free there; free some space". `file` need not exist.
std::string space_text(const std::string& file, std::uint64_t wanted_bytes);

}  // namespace ballast::io
