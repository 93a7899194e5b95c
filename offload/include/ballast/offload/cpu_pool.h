// CpuPool: the only door to oneTBB. Ranges are cut at fixed places, whatever the number of threads, and the order of
// calls never influences a result.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace ballast::offload {

class CpuPool {
 public:
  virtual ~CpuPool() = default;
  using Body = void (*)(void* context, std::size_t begin, std::size_t end);
  // Calls body on disjoint pieces of [0, count), each cut at multiples of `grain`, and returns when all are done. One
  // caller at a time per pool; body must not throw. Works inside a caller's own TBB loop (the arena is isolated).
  virtual void parallel_for(std::size_t count, std::size_t grain, Body body, void* context) = 0;
  // The most threads that are in bodies at once, the caller's included.
  virtual int threads() const = 0;
};

// An arena of its own with `threads` slots (the caller fills one), or as many as TBB may start in this process: the
// CPUs of the affinity mask, unless a tbb::global_control says otherwise. Sets no process-wide limit. Throws
// ConfigError below one thread. Threads of TBB's own stay on the CPUs of `keep_on` while they work here (empty: on
// any).
std::unique_ptr<CpuPool> make_tbb_pool(int threads, std::vector<int> keep_on = {});
// The same pieces, on the caller's thread: simulation and reference.
std::unique_ptr<CpuPool> make_inline_pool();

// parallel_for over a callable object that outlives the call (no allocation).
template <class Callable>
void parallel_for(CpuPool& pool, std::size_t count, std::size_t grain, const Callable& callable) {
  pool.parallel_for(
      count, grain,
      [](void* context, std::size_t begin, std::size_t end) { (*static_cast<const Callable*>(context))(begin, end); },
      const_cast<Callable*>(&callable));
}

}  // namespace ballast::offload
