// Words for collective calls and for ranks at odds.
// SPDX-License-Identifier: Apache-2.0
#include "call.h"

#include <algorithm>
#include <cstdio>

namespace ballast::communicators {
namespace {

constexpr std::size_t kNamedRanks = 8;  // of a longer list only the count is told

std::string bytes_of(const Signature& s) { return std::to_string(s.bytes) + " bytes"; }
std::string typed(const Signature& s) { return bytes_of(s) + " of " + std::string(to_string(s.type)); }
std::string about(const Signature& s) { return s.unit == kNoUnit ? "" : " for unit " + std::to_string(s.unit); }

}  // namespace

std::string Members::name(int rank) const {
  std::string text = "rank " + std::to_string(rank);
  if (world_rank(rank) != rank) text += " (rank " + std::to_string(world_rank(rank)) + " of the world)";
  return text;
}

std::string Members::names(std::span<const int> ranks) const {
  std::string text;
  const std::size_t shown = std::min(ranks.size(), kNamedRanks);
  for (std::size_t i = 0; i < shown; ++i) {
    if (i != 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += name(ranks[i]);
  }
  if (shown < ranks.size()) text += " and " + std::to_string(ranks.size() - shown) + " more";
  return text;
}

std::string describe(const Signature& s) {
  switch (s.kind) {
    case CallKind::barrier:
      return "barrier";
    case CallKind::broadcast:
      return "broadcast of " + bytes_of(s) + " from rank " + std::to_string(s.root);
    case CallKind::gather_bytes:
      return "all-gather of " + bytes_of(s) + " a rank";
    case CallKind::sum_values:
      return "sum of " + std::to_string(s.bytes / sizeof(double)) + " values";
    case CallKind::all_gather:
      return "all-gather of " + bytes_of(s) + " a part on a stream" + about(s);
    case CallKind::reduce_scatter:
      return "reduce-scatter of " + typed(s) + " a part" + about(s);
    case CallKind::all_reduce:
      return "all-reduce of " + typed(s) + about(s);
    case CallKind::duplicate:
      return "duplicate";
    case CallKind::split:
      return "split";
  }
  return "a call of unknown kind " + std::to_string(static_cast<int>(s.kind));
}

std::string place(const Signature& s) { return "call " + std::to_string(s.sequence) + " (" + describe(s) + ")"; }

std::string format_seconds(std::chrono::nanoseconds time) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", std::chrono::duration<double>(time).count());
  return text;
}

std::optional<std::string> disagreement(std::span<const Signature> signatures, std::span<const int> ranks,
                                        const Members& members) {
  const auto same_as_first = [&](const Signature& s) { return s == signatures.front(); };
  if (signatures.empty() || std::all_of(signatures.begin(), signatures.end(), same_as_first)) return std::nullopt;
  std::size_t reference = 0;
  std::ptrdiff_t most = 0;
  for (std::size_t i = 0; i < signatures.size(); ++i) {
    const auto alike = std::count(signatures.begin(), signatures.end(), signatures[i]);
    if (alike > most) {
      most = alike;
      reference = i;
    }
  }
  std::vector<int> agreeing;
  std::string odd;
  for (std::size_t i = 0; i < signatures.size(); ++i) {
    if (signatures[i] == signatures[reference]) {
      agreeing.push_back(ranks[i]);
      continue;
    }
    const bool earlier = signatures[i].sequence != signatures[reference].sequence;
    odd += (odd.empty() ? "" : "; ") + members.name(ranks[i]) + " made " +
           (earlier ? place(signatures[i]) : describe(signatures[i]));
  }
  return "ranks are at odds at " + place(signatures[reference]) + ": " + odd + " where " + members.names(agreeing) +
         " made " + describe(signatures[reference]) +
         ". Every rank must make the same calls with the same sizes in the same order (units count from 0)";
}

std::string overdue(const Signature& signature, std::span<const int> ranks, const Members& members,
                    std::chrono::nanoseconds timeout, bool arrived) {
  return members.names(ranks) + (arrived ? " made no progress in " : " did not come to ") + place(signature) +
         " within " + format_seconds(timeout) +
         ": dead, stopped, stuck or without that call. Look at its log; where it is only slow, raise "
         "communication.timeout_seconds";
}

PartRange part_of(std::size_t elements, int count, int rank) {
  constexpr std::size_t kBlock = 16;
  const auto ranks = static_cast<std::size_t>(count);
  const std::size_t each = ((elements + ranks - 1) / ranks + kBlock - 1) / kBlock * kBlock;
  const auto begin = std::min(elements, each * static_cast<std::size_t>(rank));
  return {begin, std::min(elements, begin + each)};
}

}  // namespace ballast::communicators
