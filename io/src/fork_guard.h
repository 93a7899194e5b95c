// ForkGuard: descriptors that a forked child must not keep. A file's lock lives as long as any descriptor of its open
// file, or any ring that registered it, in any process; O_CLOEXEC does not help a child that never calls exec.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

namespace ballast::io {

class ForkGuard {
 public:
  ForkGuard() = default;
  ~ForkGuard() { release(); }
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

  // Runs `open` (which returns a descriptor, or a negative value on failure) while no fork can come between it and its
  // registration. Returns its result; the guard does not own the descriptor.
  int open(const std::function<int()>& open_descriptor);
  // To be called before the descriptor is closed. Nothing happens where there is none.
  void release();
  // False in a forked child: the descriptor is closed there already, its number may be another's, and nothing of what
  // belongs to it may be touched.
  bool valid() const { return descriptor_ >= 0 && owned_here(); }
  bool owned_here() const;

 private:
  int descriptor_ = -1;
  unsigned generation_ = 0;
};

}  // namespace ballast::io
