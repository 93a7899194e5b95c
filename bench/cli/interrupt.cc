// Signals remembered, not acted on.
// SPDX-License-Identifier: Apache-2.0
#include "interrupt.h"

#include <ballast/base/check.h>

namespace ballast::cli {
namespace {

volatile sig_atomic_t seen = 0;

void remember(int signal) { seen = signal; }

void install(int signal, struct sigaction* before) {
  BALLAST_CHECK(::sigaction(signal, nullptr, before) == 0);
  if (before->sa_handler == SIG_IGN) return;
  struct sigaction ours {};
  ours.sa_handler = remember;
  ours.sa_flags = SA_RESTART | SA_RESETHAND;
  BALLAST_CHECK(::sigaction(signal, &ours, nullptr) == 0);
}

}  // namespace

InterruptGuard::InterruptGuard() {
  seen = 0;
  install(SIGINT, &interrupt_);
  install(SIGTERM, &terminate_);
}

InterruptGuard::~InterruptGuard() {
  ::sigaction(SIGINT, &interrupt_, nullptr);
  ::sigaction(SIGTERM, &terminate_, nullptr);
}

int InterruptGuard::signal_seen() { return seen; }

}  // namespace ballast::cli
