// A collective call as all ranks must see it, and the words for what it is and who is at odds.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/config.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace ballast::communicators {

enum class CallKind : std::uint8_t {
  barrier,
  broadcast,
  gather_bytes,
  sum_values,
  all_gather,
  reduce_scatter,
  all_reduce,
  duplicate,
  split,
};

constexpr std::uint32_t kNoUnit = 0xFFFFFFFFu;

// What every rank must give alike at one place in the order. Without padding: it is sent as it is.
struct Signature {
  std::uint64_t sequence = 0;  // the place in the order of its communicator, from 0
  std::uint64_t bytes = 0;     // of all_gather and reduce_scatter: of one part
  std::int32_t root = 0;
  std::uint32_t unit = kNoUnit;  // what it is about
  CallKind kind = CallKind::barrier;
  DataType type = DataType::fp32;
  std::uint16_t reserved = 0;
  std::uint32_t unused = 0;
  bool operator==(const Signature&) const = default;
};
static_assert(sizeof(Signature) == 32);

struct Call {
  Signature signature;
  const std::byte* source = nullptr;
  std::byte* destination = nullptr;
  int color = 0;  // of split; need not agree
};

// The ranks of one communicator, with their places in the world that it was made from.
class Members {
 public:
  Members(std::vector<int> world_ranks, int rank) : world_ranks_(std::move(world_ranks)), rank_(rank) {}
  int count() const { return static_cast<int>(world_ranks_.size()); }
  int rank() const { return rank_; }
  int world_rank(int rank) const { return world_ranks_[static_cast<std::size_t>(rank)]; }
  std::string name(int rank) const;                     // "rank 2", or "rank 1 (rank 3 of the world)"
  std::string names(std::span<const int> ranks) const;  // the first few, and how many more

 private:
  std::vector<int> world_ranks_;
  int rank_;
};

std::string describe(const Signature& signature);  // "reduce-scatter of 4096 bytes of fp32 a part for unit 3"
std::string place(const Signature& signature);     // "call 17 (reduce-scatter of ...)"
std::string format_seconds(std::chrono::nanoseconds time);

// Nothing where all agree. Otherwise who does what: those in the minority are named against the others; where halves
// disagree, against the half with the lowest rank. signatures[i] is that of ranks[i].
std::optional<std::string> disagreement(std::span<const Signature> signatures, std::span<const int> ranks,
                                        const Members& members);
// The text for ranks that did not come, or made no progress, within the time.
std::string overdue(const Signature& signature, std::span<const int> ranks, const Members& members,
                    std::chrono::nanoseconds timeout, bool arrived);

// Whole elements of rank r's part when `elements` are cut over `count` ranks: as even as blocks of 16 allow.
struct PartRange {
  std::size_t begin = 0;
  std::size_t end = 0;
};
PartRange part_of(std::size_t elements, int count, int rank);

}  // namespace ballast::communicators
