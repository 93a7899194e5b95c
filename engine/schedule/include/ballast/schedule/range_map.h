// RangeMap: who was the last to take which bytes of the device. Taking a range costs the logarithm of the number of
// ranges, and each earlier owner's part that it covers once. Pure arithmetic; no allocation once `most` ranges have
// been in it. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/check.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ballast::schedule {

class RangeMap {
 public:
  static constexpr std::uint32_t kNobody = 0xFFFFFFFFu;
  struct Owner {
    std::uint64_t key = 0;          // of the taking
    std::uint32_t entry = kNobody;  // 32 bits of the caller's
    std::uint32_t unit = kNobody;   // likewise
  };

  explicit RangeMap(std::size_t most);

  // Room for one more take(), whatever it covers; without it clear() comes first.
  bool room() const { return used_ + 2 <= most_; }
  void clear();

  // Gives [begin, end) to `owner`, end > begin; visit(const Owner&) is told of every earlier owner of a part of it, in
  // the order of the parts (one may have several). It does not touch the map.
  template <class Visit>
  void take(std::uint64_t begin, std::uint64_t end, const Owner& owner, const Visit& visit) {
    const Index after = start_at(end);
    const Index first = start_at(begin);
    for (Index i = first; i != after; i = nodes_[i].next) visit(nodes_[i].owner);
    replace(first, after, owner);
  }

  // visit(begin, end, owner) for all ranges in order; the last has no end (the largest number).
  template <class Visit>
  void for_each(const Visit& visit) const {
    for (Index i = 0; i != kNone; i = nodes_[i].next) {
      visit(nodes_[i].begin, nodes_[i].next == kNone ? ~std::uint64_t{0} : nodes_[nodes_[i].next].begin,
            nodes_[i].owner);
    }
  }

 private:
  using Index = std::uint32_t;
  static constexpr Index kNone = 0xFFFFFFFFu;

  // Ranges in order: each ends where the next begins. Node 0 is the one that begins at 0. A treap over `begin`, whose
  // priorities follow from the nodes' indices.
  struct Node {
    std::uint64_t begin = 0;
    Owner owner;
    Index left = kNone, right = kNone;
    Index next = kNone;
  };

  Index start_at(std::uint64_t place);  // the range that begins there, cut from the one that holds it where need be
  void replace(Index first, Index after, const Owner& owner);
  void split(Index tree, std::uint64_t begin, Index& below, Index& rest);
  Index merge(Index a, Index b);

  std::size_t most_;
  std::size_t used_ = 1;
  std::vector<Node> nodes_;
  Index root_ = 0;
  Index free_ = kNone;  // linked by `next`
};

}  // namespace ballast::schedule
