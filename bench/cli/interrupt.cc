// Signals remembered, not acted on.
// SPDX-License-Identifier: Apache-2.0
#include "interrupt.h"

#include <ballast/base/check.h>

namespace ballast::cli {
namespace {

volatile sig_atomic_t last_signal = 0;

void remember(int signal) { last_signal = signal; }

}  // namespace

InterruptGuard::InterruptGuard() {
  last_signal = 0;
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    BALLAST_CHECK(::sigaction(kSignals[i], nullptr, &before_[i]) == 0);
    if (before_[i].sa_handler == SIG_IGN) continue;
    struct sigaction ours {};
    ours.sa_handler = remember;
    ours.sa_flags = SA_RESTART | SA_RESETHAND;
    BALLAST_CHECK(::sigaction(kSignals[i], &ours, nullptr) == 0);
  }
}

InterruptGuard::~InterruptGuard() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
}

void InterruptGuard::check() {
  if (last_signal != 0) throw Interrupted(last_signal);
}

int InterruptGuard::seen() { return last_signal; }

}  // namespace ballast::cli
