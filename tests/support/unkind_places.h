// What makes a place unkind, for a child process of a test: filters on system calls, small limits, an ordinary user,
// file systems of its own. None of it is undone; see in_child(). SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/loop.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

#include "io_support.h"

namespace ballast::test {

constexpr int kMissing = 77;  // a child's answer: this place cannot show it

// What a child found wrong goes to standard error, where the parent's output has it.
struct Wrong : std::runtime_error {
  using std::runtime_error::runtime_error;
};
inline void expect(bool holds, const std::string& what) {
  if (!holds) throw Wrong(what);
}
inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

inline void expect_child(const std::function<int()>& body, const char* missing) {
  const int status = in_child(body, 120);
  if (exited_with(status, kMissing)) GTEST_SKIP() << missing;
  EXPECT_TRUE(exited_with(status, 0)) << "wait status " << status;
}

// From now on the given system calls end with error_number.
inline void deny(std::initializer_list<long> calls, int error_number) {
  std::vector<sock_filter> program;
  program.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)));
  for (const long call : calls) {
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<std::uint32_t>(call), 0, 1));
    program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<std::uint32_t>(error_number)));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  expect(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "no_new_privs");
  expect(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0, "seccomp");
}

// An ordinary user: root's capabilities would lift the limits.
inline void become_ordinary() {
  if (::geteuid() == 0) expect(::setresuid(65534, 65534, 65534) == 0, "setresuid");
}

inline void limit(__rlimit_resource resource, rlim_t value) {
  const rlimit wanted{value, value};
  expect(::setrlimit(resource, &wanted) == 0, "setrlimit");
}

// Mounts of this process alone from now on. False: no right to.
inline bool own_mounts() {
  if (::unshare(CLONE_NEWNS) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
  return ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
}

inline bool mount_tmpfs(const std::string& at, std::uint64_t bytes) {
  return ::mount("tmpfs", at.c_str(), "tmpfs", 0, ("size=" + std::to_string(bytes)).c_str()) == 0;
}

// An ext4 file system in a file, on a loop device that goes with the mount. False where there is none to be had.
inline bool mount_ext4(const std::string& at, const std::string& image, std::uint64_t bytes) {
  const Descriptor backing(::open(image.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (backing.get() < 0 || ::ftruncate(backing.get(), static_cast<off_t>(bytes)) != 0) return false;
  if (std::system(("mkfs.ext4 -q -F -m 0 '" + image + "' > /dev/null 2>&1").c_str()) != 0) return false;
  const Descriptor control(::open("/dev/loop-control", O_RDWR | O_CLOEXEC));
  for (int attempt = 0; attempt < 20 && control.get() >= 0; ++attempt) {
    const int number = ::ioctl(control.get(), LOOP_CTL_GET_FREE);
    if (number < 0) return false;
    const std::string device = "/dev/loop" + std::to_string(number);
    const Descriptor loop(::open(device.c_str(), O_RDWR | O_CLOEXEC));
    loop_config configuration = {};
    configuration.fd = static_cast<std::uint32_t>(backing.get());
    configuration.info.lo_flags = LO_FLAGS_AUTOCLEAR;
    if (loop.get() < 0) return false;
    if (::ioctl(loop.get(), LOOP_CONFIGURE, &configuration) != 0) continue;  // another test was faster
    return ::mount(device.c_str(), at.c_str(), "ext4", 0, nullptr) == 0;
  }
  return false;
}

}  // namespace ballast::test
