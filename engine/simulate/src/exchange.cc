// What passes between ranks in the model.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/simulate/exchange.h>

#include <algorithm>

namespace ballast::simulate {

using schedule::Action;
using schedule::Task;

std::uint64_t Exchange::ended_by_all(std::size_t kind) const {
  std::uint64_t ended = parties_[0].kinds[kind].finished;
  for (const Party& party : parties_) {
    if (!mirrored_) ended = std::min(ended, party.kinds[kind].finished);
  }
  return ended;
}

std::string Exchange::start(Index rank, const Action& action, std::vector<Content> brought) {
  const std::size_t kind = kind_of(action.task);
  Kind& mine = parties_[rank].kinds[kind];
  if (mine.started != mine.finished) return "two collectives of one kind at once";
  const std::uint64_t number = mine.started++;
  const std::uint64_t first = ended_by_all(kind);
  const char* const name = kind == 0 ? "gather " : "reduction ";
  std::string differs;
  for (Index other = 0; other < parties_.size(); ++other) {
    const Kind& theirs = parties_[other].kinds[kind];
    if (other == rank || theirs.started <= number) continue;
    const Record& record = theirs.records[number - first];
    if (record.unit == action.unit && record.brought.size() == brought.size()) continue;
    differs = name + std::to_string(number) + " is of unit " + std::to_string(action.unit) + " on rank " +
              std::to_string(rank) + " and of unit " + std::to_string(record.unit) + " on rank " +
              std::to_string(other);
  }
  mine.records.push_back({action.unit, std::move(brought)});
  return differs;
}

const Exchange::Record& Exchange::under_way(Index rank, std::size_t kind) const {
  const Kind& mine = parties_[rank].kinds[kind];
  BALLAST_CHECK(mine.started > mine.finished);
  return mine.records[mine.finished - ended_by_all(kind)];
}

bool Exchange::may_finish(Index rank, Task task) const {
  if (mirrored_) return true;
  const std::size_t kind = kind_of(task);
  const std::uint64_t number = parties_[rank].kinds[kind].finished;
  const Index ranks = ranks_of(under_way(rank, kind).unit);
  const auto first = parties_.begin() + rank / ranks * ranks;
  return std::all_of(first, first + ranks, [&](const Party& p) { return p.kinds[kind].started > number; });
}

void Exchange::collect(Index rank, Task task, std::vector<const std::vector<Content>*>& brought) const {
  const std::size_t kind = kind_of(task);
  const std::uint64_t at = parties_[rank].kinds[kind].finished - ended_by_all(kind);
  brought.clear();
  const Index ranks = ranks_of(under_way(rank, kind).unit);
  const Index first = rank / ranks * ranks;
  for (Index i = 0; i < ranks; ++i) {
    const Index other = first + (rank - first + i) % ranks;
    brought.push_back(&parties_[mirrored_ ? rank : other].kinds[kind].records[at].brought);
  }
}

void Exchange::finish(Index rank, Task task) {
  const std::size_t kind = kind_of(task);
  const std::uint64_t before = ended_by_all(kind);
  ++parties_[rank].kinds[kind].finished;
  if (ended_by_all(kind) == before) return;
  for (Party& party : parties_) {
    auto& records = party.kinds[kind].records;
    if (!records.empty()) records.erase(records.begin());
  }
}

bool Exchange::may_pass(Index rank) const {
  if (mirrored_) return true;
  const std::uint32_t number = parties_[rank].passed;
  return std::all_of(parties_.begin(), parties_.end(), [&](const Party& p) { return p.arrived > number; });
}

std::string Exchange::unmatched() const {
  for (const Party& party : parties_) {
    for (std::size_t kind = 0; kind < 2 && !mirrored_; ++kind) {
      if (party.kinds[kind].started != parties_[0].kinds[kind].started ||
          party.kinds[kind].finished != party.kinds[kind].started) {
        return "the ranks have ended with different collectives";
      }
    }
  }
  return {};
}

void Exchange::serialize(Index rank, std::vector<std::uint32_t>& out) const {
  std::uint32_t passed = parties_[0].passed;
  for (const Party& party : parties_) passed = std::min(passed, party.passed);
  out.push_back((parties_[rank].arrived - passed) | (parties_[rank].passed - passed) << 16);
  for (std::size_t kind = 0; kind < 2; ++kind) {
    const Kind& mine = parties_[rank].kinds[kind];
    const std::uint64_t first = ended_by_all(kind);
    out.push_back(static_cast<std::uint32_t>((mine.started - first) | (mine.finished - first) << 16));
    for (const Record& record : mine.records) {
      out.push_back(record.unit);
      for (const Content& c : record.brought) {
        out.push_back(static_cast<std::uint32_t>(c.what) | static_cast<std::uint32_t>(c.number) << 16);
        out.push_back(c.mask);
      }
    }
  }
}

}  // namespace ballast::simulate
