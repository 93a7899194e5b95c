// Ctrl-C, SIGTERM and SIGHUP as a question asked where the work can be left. The second one ends the process at once.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>

#include <array>
#include <exception>
#include <string>

namespace ballast::cli {

// Leaves the work by unwinding, so that everything made on the way is removed.
class Interrupted : public std::exception {
 public:
  explicit Interrupted(int signal, const std::string& where = "") : signal_(signal), text_("interrupted" + where) {}
  int signal() const { return signal_; }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  int signal_;
  std::string text_;
};

// One at a time in a process. Signals that were ignored stay ignored.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

  static void check();  // throws Interrupted once a signal has come
  static int seen();    // the signal that has come, or 0

 private:
  static constexpr std::array<int, 3> kSignals = {SIGINT, SIGTERM, SIGHUP};
  std::array<struct sigaction, kSignals.size()> before_{};
};

}  // namespace ballast::cli
