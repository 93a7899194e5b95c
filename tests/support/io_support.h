// What the io tests share: scratch directories on a real disk, aligned memory with known bytes, seeds, child processes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/random.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <string>

namespace ballast::test {

// A fresh directory under the working directory (the build tree, so a real disk), removed at the end.
class ScratchDirectory {
 public:
  explicit ScratchDirectory(const std::string& parent = std::filesystem::current_path().string()) {
    std::string pattern = parent + "/ballast-test-XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp " + pattern);
    path_ = pattern;
  }
  ~ScratchDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// Page-aligned memory.
class AlignedMemory {
 public:
  explicit AlignedMemory(std::size_t bytes) : bytes_(bytes) {
    data_ = static_cast<std::byte*>(::operator new(bytes == 0 ? 1 : bytes, std::align_val_t(4096)));
    std::memset(data_, 0, bytes);
  }
  ~AlignedMemory() { ::operator delete(data_, std::align_val_t(4096)); }
  AlignedMemory(const AlignedMemory&) = delete;
  AlignedMemory& operator=(const AlignedMemory&) = delete;
  std::byte* data() { return data_; }
  std::size_t size() const { return bytes_; }
  std::span<std::byte> span() { return {data_, bytes_}; }

 private:
  std::byte* data_;
  std::size_t bytes_;
};

inline void fill_pattern(std::span<std::byte> memory, std::uint64_t seed) {
  base::Random random(seed);
  std::size_t i = 0;
  for (; i + 8 <= memory.size(); i += 8) {
    const std::uint64_t value = random.next();
    std::memcpy(memory.data() + i, &value, 8);
  }
  for (; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(random.next());
}

inline bool holds_pattern(std::span<const std::byte> memory, std::uint64_t seed) {
  base::Random random(seed);
  std::size_t i = 0;
  for (; i + 8 <= memory.size(); i += 8) {
    const std::uint64_t value = random.next();
    if (std::memcmp(memory.data() + i, &value, 8) != 0) return false;
  }
  for (; i < memory.size(); ++i) {
    if (memory[i] != static_cast<std::byte>(random.next())) return false;
  }
  return true;
}

// The seed of a randomised test: BALLAST_SEED where set, else the given one. A failure prints how to repeat it.
class Seed {
 public:
  explicit Seed(std::uint64_t usual) : value_(usual) {
    if (const char* text = std::getenv("BALLAST_SEED")) value_ = std::strtoull(text, nullptr, 10);
  }
  ~Seed() {
    if (!::testing::Test::HasFailure()) return;
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    std::printf("repeat with: BALLAST_SEED=%llu <this program> --gtest_filter=%s.%s\n",
                static_cast<unsigned long long>(value_), info->test_suite_name(), info->name());
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_;
};

// A descriptor that closes itself.
class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return value_; }

 private:
  int value_;
};

// Runs `body` in a forked child, which exits with what it returns. Returns the wait status; a child that takes longer
// than the limit is killed and reported as SIGKILL.
inline int in_child(const std::function<int()>& body, int limit_seconds = 60) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    int code = 99;
    try {
      code = body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
    }
    std::fflush(nullptr);
    ::_exit(code);
  }
  int status = 0;
  for (int i = 0; i < limit_seconds * 200; ++i) {
    if (::waitpid(child, &status, WNOHANG) == child) return status;
    const timespec pause{0, 5'000'000};
    ::nanosleep(&pause, nullptr);
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, &status, 0);
  return status;
}

inline bool exited_with(int status, int code) { return WIFEXITED(status) && WEXITSTATUS(status) == code; }

inline std::size_t open_descriptors() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

inline std::size_t threads_now() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) ++count;
  return count;
}

}  // namespace ballast::test
