// Two calls on a thread of their own.
// SPDX-License-Identifier: Apache-2.0
#include "mpi_thread.h"

#include <mpi.h>

#include <utility>

namespace ballast::communicators {

MpiThread::MpiThread() : state_(std::make_shared<State>()), thread_([state = state_] { work(state); }) {}

MpiThread::~MpiThread() {
  if (left_behind_) {
    thread_.detach();
    return;
  }
  {
    const std::lock_guard lock(state_->mutex);
    state_->wish = State::Wish::leave;
  }
  state_->changed.notify_all();
  thread_.join();
}

std::optional<int> MpiThread::initialize(std::chrono::nanoseconds timeout) {
  return ask(State::Wish::initialize, timeout);
}

std::optional<int> MpiThread::finalize(std::chrono::nanoseconds timeout) { return ask(State::Wish::finalize, timeout); }

std::optional<int> MpiThread::ask(State::Wish wish, std::chrono::nanoseconds timeout) {
  std::unique_lock lock(state_->mutex);
  state_->code.reset();
  state_->wish = wish;
  state_->changed.notify_all();
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  left_behind_ = !state_->changed.wait_until(lock, deadline, [&] { return state_->code.has_value(); });
  return state_->code;
}

void MpiThread::work(const std::shared_ptr<State>& state) {
  for (;;) {
    std::unique_lock lock(state->mutex);
    state->changed.wait(lock, [&] { return state->wish != State::Wish::nothing; });
    const State::Wish wish = std::exchange(state->wish, State::Wish::nothing);
    if (wish == State::Wish::leave) return;
    lock.unlock();
    int provided = 0;
    const int code = wish == State::Wish::initialize ? MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided)
                                                     : MPI_Finalize();
    lock.lock();
    state->code = code;
    lock.unlock();
    state->changed.notify_all();
  }
}

}  // namespace ballast::communicators
