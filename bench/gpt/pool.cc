// WorkPool: taking a task is one compare-and-swap on the count of those left.
// SPDX-License-Identifier: Apache-2.0
#include "pool.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>
#include <utility>

namespace ballast::gpt {
namespace {

constexpr int kSpins = 1000;  // about 20 us: longer than the gap between two loops of one layer

void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// CPUs by the cgroup's quota, rounded up; 0 where there is none.
int quota_cpus() {
  double quota = -1, period = 0;
  std::ifstream v2("/sys/fs/cgroup/cpu.max");
  std::string first;
  if (v2 >> first >> period) {
    if (first == "max") return 0;
    quota = std::atof(first.c_str());
  } else {
    std::ifstream quota_file("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"),
        period_file("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
    if (!(quota_file >> quota) || !(period_file >> period)) return 0;
  }
  if (quota <= 0 || period <= 0) return 0;
  return static_cast<int>((quota + period - 1) / period);
}

}  // namespace

int default_threads() {
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    const long value = std::strtol(text, nullptr, 10);  // of a list by nesting level, the first
    if (value >= 1 && value <= 4096) return static_cast<int>(value);
  }
  int cpus = static_cast<int>(std::thread::hardware_concurrency());
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) cpus = CPU_COUNT(&set);
  if (const int quota = quota_cpus(); quota > 0) cpus = std::min(cpus, quota);
  return std::max(cpus, 1);
}

WorkPool::WorkPool(int threads) {
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (...) {
    stop_ = true;
    loops_.fetch_add(1);
    loops_.notify_all();
    for (auto& worker : workers_) worker.join();
    throw;
  }
}

WorkPool::~WorkPool() {
  stop_ = true;
  loops_.fetch_add(1);
  loops_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void WorkPool::run_erased(std::int64_t tasks, Call call, void* context) {
  if (tasks <= 0) return;
  call_ = call;
  context_ = context;
  tasks_ = tasks;
  done_.store(0, std::memory_order_relaxed);
  remaining_.store(tasks, std::memory_order_release);
  if (tasks > 1 && !workers_.empty()) {
    loops_.fetch_add(1, std::memory_order_release);
    loops_.notify_all();
  }
  while (take_one(0)) {
  }
  std::int64_t done = done_.load(std::memory_order_acquire);
  for (int spin = 0; done != tasks; done = done_.load(std::memory_order_acquire)) {
    if (++spin < kSpins) {
      pause_cpu();
    } else {
      done_.wait(done, std::memory_order_acquire);
    }
  }
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

bool WorkPool::take_one(int thread) {
  std::int64_t left = remaining_.load(std::memory_order_relaxed);
  do {
    if (left == 0) return false;
  } while (!remaining_.compare_exchange_weak(left, left - 1, std::memory_order_acquire, std::memory_order_relaxed));
  const std::int64_t tasks = tasks_;
  run_task(tasks - left, thread);
  if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == tasks) done_.notify_all();
  return true;
}

void WorkPool::run_task(std::int64_t task, int thread) {
  try {
    call_(context_, task, thread);
  } catch (...) {
    const std::lock_guard lock(error_mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

void WorkPool::work(int thread) {
  std::uint32_t seen = 0;
  for (;;) {
    int spin = 0;
    while (loops_.load(std::memory_order_acquire) == seen) {
      if (++spin < kSpins) {
        pause_cpu();
      } else {
        loops_.wait(seen, std::memory_order_acquire);
      }
    }
    seen = loops_.load(std::memory_order_acquire);
    if (stop_) return;
    while (take_one(thread)) {
    }
  }
}

}  // namespace ballast::gpt
