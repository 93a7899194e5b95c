// A program with a race in the body of a parallel loop. Under ThreadSanitizer it must be reported; see offload.cmake.
// SPDX-License-Identifier: Apache-2.0
#include <oneapi/tbb/global_control.h>

#include <cstdio>
#include <thread>

#include "ballast/offload/cpu_pool.h"

int main() {
  const tbb::global_control wide(tbb::global_control::max_allowed_parallelism, 4);
  const auto pool = ballast::offload::make_tbb_pool(4);
  long sum = 0;
  for (int round = 0; round < 200; ++round) {
    ballast::offload::parallel_for(*pool, 64, 1, [&](std::size_t begin, std::size_t) {
      sum += static_cast<long>(begin);  // the race
      std::this_thread::yield();
    });
  }
  std::printf("%ld\n", sum);
}
