// UringRing: one ring, set up with the best flags that this kernel has, proven to work, and given back in an order that
// leaves nothing behind. One thread at a time.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <liburing.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "fork_guard.h"

namespace ballast::io {

class UringRing {
 public:
  // Room for `depth` requests in flight: neither queue can overflow. wake_descriptor (or -1) is signalled at each
  // completion. Throws UringUnavailable.
  UringRing(std::uint32_t depth, int wake_descriptor);
  // Nothing may be in flight.
  ~UringRing();
  UringRing(const UringRing&) = delete;
  UringRing& operator=(const UringRing&) = delete;

  io_uring* get() { return &ring_; }
  // False in a forked child, where nothing of the ring may be touched.
  bool owned_here() const { return guard_.owned_here(); }

  // Registers a descriptor: its index, or -1 where it has to be used by its number.
  int add_file(int descriptor);
  // Registers memory besides what is registered already, in pieces; false with *reason where the kernel refuses.
  bool register_memory(std::span<std::byte> memory, std::string* reason);
  // The registered piece that holds `data`, and in *bytes how many of the wanted bytes lie within it; -1 where it is in
  // none (then *bytes ends before the next one).
  int find_buffer(const std::byte* data, std::uint64_t* bytes) const;

 private:
  void set_up(std::uint32_t entries);
  void prove();
  int register_all(const std::vector<iovec>& pieces);

  io_uring ring_ = {};
  ForkGuard guard_;
  std::uint32_t file_slots_ = 0;
  std::uint32_t files_ = 0;
  std::vector<iovec> pieces_;  // sorted by address, disjoint
};

}  // namespace ballast::io
