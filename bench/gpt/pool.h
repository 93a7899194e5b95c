// WorkPool: a few threads that share the tasks of one loop at a time. Tasks are handed out one by one, so a thread that
// the engine's own work holds up takes fewer of them; what a task computes never depends on who runs it. Idle threads
// spin briefly, then sleep: the cores belong to the engine's updates as much as to the maths.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace ballast::gpt {

// How many threads the maths takes where nothing is said: OMP_NUM_THREADS where set, else the CPUs that affinity and
// the cgroup's quota leave.
int default_threads();

class WorkPool {
 public:
  explicit WorkPool(int threads);  // the caller of run() is one of them
  ~WorkPool();
  WorkPool(const WorkPool&) = delete;
  WorkPool& operator=(const WorkPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(task, thread) for each task in [0, tasks), thread in [0, threads()); returns when all are done. One
  // caller at a time; not from inside a task. Rethrows the first exception of a task. Allocates nothing.
  template <class Body>
  void run(std::int64_t tasks, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run_erased(
        tasks, [](void* context, std::int64_t task, int thread) { (*static_cast<Plain*>(context))(task, thread); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }
  // Calls body(first, last, thread) over [0, total) in pieces of `grain`.
  template <class Body>
  void run_ranges(std::int64_t total, std::int64_t grain, Body&& body) {
    if (grain < 1) grain = 1;
    run((total + grain - 1) / grain, [&](std::int64_t task, int thread) {
      const std::int64_t first = task * grain;
      body(first, first + grain < total ? first + grain : total, thread);
    });
  }

 private:
  using Call = void (*)(void* context, std::int64_t task, int thread);
  void run_erased(std::int64_t tasks, Call call, void* context);
  void work(int thread);
  bool take_one(int thread);
  void run_task(std::int64_t task, int thread);

  // The open loop. Written by run() alone, and only while remaining_ is 0; read by a thread only after it has taken a
  // task, which keeps run() from returning.
  Call call_ = nullptr;
  void* context_ = nullptr;
  std::int64_t tasks_ = 0;

  alignas(64) std::atomic<std::int64_t> remaining_{0};  // tasks not yet taken
  alignas(64) std::atomic<std::int64_t> done_{0};
  alignas(64) std::atomic<std::uint32_t> loops_{0};  // opened so far; what idle threads sleep on
  std::atomic<bool> stop_{false};
  std::mutex error_mutex_;
  std::exception_ptr error_;
  std::vector<std::thread> workers_;
};

}  // namespace ballast::gpt
