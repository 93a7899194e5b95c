// Files that a command writes for machines: whole or not at all, and refused before the work rather than after it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ballast::cli {

// Throws ConfigError where an output (option and path; empty ones do not count) is another output, or one of what the
// command reads or fills otherwise. Pipes and devices may be named twice.
using NamedPaths = std::vector<std::pair<std::string, std::string>>;
void require_distinct(const NamedPaths& outputs, const NamedPaths& others);

// A file that appears at once when all of it is written: a temporary beside it, then a rename. A path that is there and
// is no regular file (a pipe, a terminal) is written in place, and never cut; what an open descriptor of this process
// leads to (/dev/stdout, /dev/fd/3, or the very file that standard output goes to) is written through that descriptor,
// after what has gone there before. A link to a file stays one.
class OutputFile {
 public:
  // With an empty path nothing is written. Throws ConfigError where the file could not be made.
  explicit OutputFile(std::string path);
  ~OutputFile();  // removes what was not published
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  bool wanted() const { return !path_.empty(); }
  // Where to write before publish().
  const std::string& temporary_path() const { return temporary_; }
  // Throw IoError.
  void publish();
  void publish(std::string_view text);

 private:
  bool in_place() const { return temporary_ == path_; }

  std::string path_;
  std::string temporary_;
  int descriptor_ = -1;  // of this process's own
  bool published_ = false;
};

// The open descriptor of this process that a path leads to, or -1: by its place (/dev/stdout, /proc/self/fd/3) or, for
// standard output and error, by what they write to where that is a file.
int own_descriptor(const std::string& path);

// A file that grows by whole lines, each written by one call. What an earlier process left of a torn line is cut off.
class LineLog {
 public:
  // With an empty path nothing is written. Throws ConfigError where the file cannot be appended to.
  explicit LineLog(std::string path);
  ~LineLog();  // removes a file that it made and that stayed empty
  LineLog(const LineLog&) = delete;
  LineLog& operator=(const LineLog&) = delete;

  // `line` without its newline. Throws IoError.
  void append(std::string_view line);

 private:
  std::string path_;
  int descriptor_ = -1;
  bool shared_ = false;  // with standard output or another descriptor
  bool made_ = false;
  bool written_ = false;
};

}  // namespace ballast::cli
