// A treap of ranges.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/base/random.h>
#include <ballast/schedule/range_map.h>

namespace ballast::schedule {

RangeMap::RangeMap(std::size_t most) : most_(most) {
  nodes_.reserve(most);
  nodes_.emplace_back();
}

void RangeMap::clear() {
  nodes_.resize(1);
  nodes_[0] = Node{};
  root_ = 0;
  free_ = kNone;
  used_ = 1;
}

RangeMap::Index RangeMap::start_at(std::uint64_t place) {
  Index holder = 0;
  for (Index i = root_; i != kNone;) {
    const bool before = nodes_[i].begin <= place;
    if (before) holder = i;
    i = before ? nodes_[i].right : nodes_[i].left;
  }
  if (nodes_[holder].begin == place) return holder;
  BALLAST_CHECK(used_ < most_);
  ++used_;
  Index cut = free_;
  if (cut == kNone) {
    cut = static_cast<Index>(nodes_.size());
    nodes_.emplace_back();
  } else {
    free_ = nodes_[cut].next;
  }
  nodes_[cut] = Node{place, nodes_[holder].owner, kNone, kNone, nodes_[holder].next};
  nodes_[holder].next = cut;
  Index below = kNone, rest = kNone;
  split(root_, place, below, rest);
  root_ = merge(merge(below, cut), rest);
  return cut;
}

void RangeMap::replace(Index first, Index after, const Owner& owner) {
  nodes_[first].owner = owner;
  if (nodes_[first].next == after) return;
  Index below = kNone, rest = kNone, covered = kNone, above = kNone;
  split(root_, nodes_[first].begin, below, rest);
  split(rest, nodes_[after].begin, covered, above);
  for (Index i = nodes_[first].next; i != after;) {
    const Index next = nodes_[i].next;
    nodes_[i].next = free_;
    free_ = i;
    --used_;
    i = next;
  }
  nodes_[first].left = nodes_[first].right = kNone;
  nodes_[first].next = after;
  root_ = merge(merge(below, first), above);
}

// Those that begin before `begin`, and the rest.
void RangeMap::split(Index tree, std::uint64_t begin, Index& below, Index& rest) {
  if (tree == kNone) {
    below = rest = kNone;
  } else if (nodes_[tree].begin < begin) {
    below = tree;
    Index right = kNone;
    split(nodes_[tree].right, begin, right, rest);
    nodes_[below].right = right;
  } else {
    rest = tree;
    Index left = kNone;
    split(nodes_[tree].left, begin, below, left);
    nodes_[rest].left = left;
  }
}

// All of `a` lie before all of `b`.
RangeMap::Index RangeMap::merge(Index a, Index b) {
  if (a == kNone) return b;
  if (b == kNone) return a;
  if (base::mix(a) > base::mix(b)) {
    nodes_[a].right = merge(nodes_[a].right, b);
    return a;
  }
  nodes_[b].left = merge(a, nodes_[b].left);
  return b;
}

}  // namespace ballast::schedule
