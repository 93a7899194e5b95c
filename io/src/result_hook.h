// Where tests put the kernel's unpleasant answers into a back end: results of single requests and of whole calls.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/io/storage.h>

#include <cstdint>
#include <functional>

namespace ballast::io {

struct ResultHook {
  // Sees each result (a count, or a negated errno) of a request of requested_bytes; what it returns is taken instead.
  // The bytes have moved by then, so a smaller count or EAGAIN makes them move again. Any thread.
  std::function<std::int64_t(Direction, std::uint64_t requested_bytes, std::int64_t result)> request;
  // Asked before each call into the ring: a negated errno stands for the call, 0 lets it happen.
  std::function<int()> enter;
};

}  // namespace ballast::io
