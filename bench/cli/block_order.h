// BlockOrder: the order in which a raw pass moves the blocks of one file. Pure arithmetic.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

namespace ballast::cli {

// read, write: each block once, in order. rewrite: each block is read and then written back, in runs of `run_blocks`:
// first the runs that may be under way ahead, then a run written and a run read in turn, as a training step does it.
class BlockOrder {
 public:
  enum class Pattern : std::uint8_t { read, write, rewrite };
  struct Move {
    bool write = false;
    std::uint64_t block = 0;
  };

  // All of at least 1. `queue_depth` requests are under way at once; none of them waits for another.
  BlockOrder(Pattern pattern, std::uint64_t blocks, std::uint64_t run_blocks, std::uint64_t queue_depth)
      : pattern_(pattern),
        blocks_(blocks),
        run_(run_blocks),
        ahead_(std::min(runs_ahead(run_blocks, queue_depth) * run_blocks, blocks)) {}

  // Buffers with which no request ever waits for one that comes later.
  static std::uint64_t buffers(std::uint64_t run_blocks, std::uint64_t queue_depth) {
    return (runs_ahead(run_blocks, queue_depth) + 1) * run_blocks + queue_depth;
  }

  std::uint64_t moves() const { return pattern_ == Pattern::rewrite ? 2 * blocks_ : blocks_; }

  // The i-th request, i below moves().
  Move at(std::uint64_t i) const {
    if (pattern_ != Pattern::rewrite) return {pattern_ == Pattern::write, i};
    if (i < ahead_) return {false, i};
    i -= ahead_;
    // Whole runs in turn until the last full run has been read, then a run of what is left, then only writes.
    const std::uint64_t left = blocks_ - ahead_, whole = left / run_ * run_, part = left - whole;
    if (i < 2 * whole) {
      const std::uint64_t run = i / run_ / 2, within = i % run_;
      return i / run_ % 2 == 0 ? Move{true, run * run_ + within} : Move{false, ahead_ + run * run_ + within};
    }
    i -= 2 * whole;
    if (i < part) return {false, ahead_ + whole + i};
    return {true, whole + i - part};
  }

 private:
  static std::uint64_t runs_ahead(std::uint64_t run, std::uint64_t depth) { return (depth + run - 1) / run + 1; }

  Pattern pattern_;
  std::uint64_t blocks_, run_, ahead_;
};

}  // namespace ballast::cli
