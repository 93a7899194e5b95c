// A user's own TBB loop, for tests that call us from inside one.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tsan_annotations.h"

namespace ballast::offload {

// Calls function(context) once for each of `iterations`, in an arena of `threads`.
void outer_loop(int threads, int iterations, void (*function)(void* context), void* context);

// The same over a callable object, with the loop's order told to ThreadSanitizer.
template <class Callable>
void outer_loop(int threads, int iterations, Callable callable) {
  tsan_release(&callable);
  outer_loop(
      threads, iterations,
      [](void* context) {
        tsan_acquire(context);
        (*static_cast<Callable*>(context))();
        tsan_release(context);
      },
      &callable);
  tsan_acquire(&callable);
}

}  // namespace ballast::offload
