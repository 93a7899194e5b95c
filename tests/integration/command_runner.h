// Runs the built command as a user would, in a folder of the test's own.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace ballast::testing {

struct CommandResult {
  int status = -1;  // exit status; 128 + signal where one ended it
  std::string output, error;
  std::vector<std::string> error_lines() const;  // without empty ones
};

// A folder that is removed with all it holds.
class ScratchFolder {
 public:
  ScratchFolder();
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  const std::string& path() const { return path_; }
  std::string write(const std::string& name, const std::string& text) const;  // its path
  std::vector<std::string> entries() const;                                   // sorted names

 private:
  std::string path_;
};

// `stop_after_ms` above 0: sends `signal` then. Environment entries ("NAME=value") are added to the test's own.
CommandResult run_command(const std::vector<std::string>& arguments, const std::vector<std::string>& environment = {},
                          int stop_after_ms = 0, int signal = 0);
// Likewise for any program on the path, named first.
CommandResult run_program(const std::vector<std::string>& arguments, const std::vector<std::string>& environment = {},
                          int stop_after_ms = 0, int signal = 0);

std::string read_file(const std::string& path);
std::string source_path(const std::string& below);  // of the source tree

}  // namespace ballast::testing
