// See outer_loop.h. Compiled without thread instrumentation, as oneTBB's library is.
// SPDX-License-Identifier: Apache-2.0
#include "contract/outer_loop.h"

#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

namespace ballast::offload {

void outer_loop(int threads, int iterations, void (*function)(void* context), void* context) {
  tbb::task_arena arena(threads);
  arena.execute([&] { tbb::parallel_for(0, iterations, [=](int) { function(context); }); });
}

}  // namespace ballast::offload
