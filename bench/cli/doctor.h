// What `ballast doctor` finds on this machine: one line per thing that training depends on, with how to mend it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace ballast::cli {

struct AcceleratorFacts;  // accelerators.h

struct DoctorLine {
  enum class State { good, warning, bad };  // warning: works, slower or with less; bad: does not work
  using enum State;
  std::string what;  // "direct I/O: run"
  State state = State::good;
  std::string finding;  // one sentence
  std::string cure;     // empty where there is nothing to mend
};

// Examines the machine and each directory. A directory that is not there yet is examined where it would be made. Writes
// and removes one small file per directory and leaves nothing behind; takes well under a second. Never throws for what
// it finds.
std::vector<DoctorLine> examine(const std::vector<std::string>& nvme_paths, const AcceleratorFacts& accelerators);

}  // namespace ballast::cli
