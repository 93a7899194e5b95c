// fork, exec, and two pipes read to their ends.
// SPDX-License-Identifier: Apache-2.0
#include "command_runner.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

namespace ballast::testing {
namespace {

using Clock = std::chrono::steady_clock;

// Appends what is there; false at the end of the stream.
bool drain(int descriptor, std::string* text) {
  char buffer[4096];
  const ssize_t count = ::read(descriptor, buffer, sizeof buffer);
  if (count > 0) text->append(buffer, static_cast<std::size_t>(count));
  return count > 0;
}

}  // namespace

std::vector<std::string> CommandResult::error_lines() const {
  std::vector<std::string> lines;
  std::istringstream stream(error);
  for (std::string line; std::getline(stream, line);)
    if (!line.empty()) lines.push_back(line);
  return lines;
}

ScratchFolder::ScratchFolder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "ballast-command-XXXXXX").string();
  EXPECT_NE(::mkdtemp(pattern.data()), nullptr);
  path_ = pattern;
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string ScratchFolder::write(const std::string& name, const std::string& text) const {
  const std::string path = path_ + "/" + name;
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

std::vector<std::string> ScratchFolder::entries() const {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path_)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

CommandResult run_command(const std::vector<std::string>& arguments, const std::vector<std::string>& environment,
                          int stop_after_ms, int signal) {
  std::vector<std::string> all = {BALLAST_COMMAND};
  all.insert(all.end(), arguments.begin(), arguments.end());
  return run_program(all, environment, stop_after_ms, signal);
}

CommandResult run_program(const std::vector<std::string>& arguments, const std::vector<std::string>& environment,
                          int stop_after_ms, int signal) {
  std::array<int, 2> output{}, error{};
  EXPECT_EQ(::pipe(output.data()), 0);
  EXPECT_EQ(::pipe(error.data()), 0);
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(output[1], STDOUT_FILENO);
    ::dup2(error[1], STDERR_FILENO);
    for (const int descriptor : {output[0], output[1], error[0], error[1]}) ::close(descriptor);
    for (const std::string& entry : environment) ::putenv(const_cast<char*>(entry.c_str()));
    ::execvp(argv[0], argv.data());
    ::_exit(127);
  }
  EXPECT_GT(child, 0);
  ::close(output[1]);
  ::close(error[1]);
  CommandResult result;
  const Clock::time_point begin = Clock::now();
  bool stopped = stop_after_ms == 0;
  std::array<pollfd, 2> streams = {{{output[0], POLLIN, 0}, {error[0], POLLIN, 0}}};
  for (int open = 2; open > 0;) {
    ::poll(streams.data(), streams.size(), 20);
    if (!stopped && Clock::now() - begin > std::chrono::milliseconds(stop_after_ms)) {
      ::kill(child, signal);
      stopped = true;
    }
    for (std::size_t i = 0; i < streams.size(); ++i) {
      if (streams[i].revents == 0 || drain(streams[i].fd, i == 0 ? &result.output : &result.error)) continue;
      ::close(streams[i].fd);
      streams[i].fd = -1;
      --open;
    }
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string source_path(const std::string& below) { return std::string(BALLAST_SOURCE_DIR) + "/" + below; }

}  // namespace ballast::testing
