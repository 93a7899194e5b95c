// The thread that starts MPI and ends it. Both wait for all ranks without end: so who wants them waits here with a
// deadline, and where it passes the thread is left behind until the process ends.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

namespace ballast::communicators {

class MpiThread {
 public:
  MpiThread();
  ~MpiThread();  // MPI is not finalised, unless finalize() has been called
  MpiThread(const MpiThread&) = delete;
  MpiThread& operator=(const MpiThread&) = delete;

  // MPI_Init_thread with MPI_THREAD_MULTIPLE, and MPI_Finalize: each once, in this order. MPI's code; nothing where it
  // has not come back within the time.
  std::optional<int> initialize(std::chrono::nanoseconds timeout);
  std::optional<int> finalize(std::chrono::nanoseconds timeout);

 private:
  // Shared with the thread, which may outlive this object.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    enum class Wish : std::uint8_t { nothing, initialize, finalize, leave } wish = Wish::nothing;
    std::optional<int> code;
  };
  static void work(const std::shared_ptr<State>& state);
  std::optional<int> ask(State::Wish wish, std::chrono::nanoseconds timeout);

  const std::shared_ptr<State> state_;
  bool left_behind_ = false;
  std::thread thread_;
};

}  // namespace ballast::communicators
