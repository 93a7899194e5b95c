// ResidentChunks: the chunks with states outside NVMe that were updated since they were last written there. What the
// step that is to be committed has updated may be written at once; what an earlier one has, only when all updates of
// that step are done, as another may be on its way.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ballast::engine {

// One thread at a time; allocates at construction only.
class ResidentChunks {
 public:
  explicit ResidentChunks(std::size_t chunks) : states_(chunks, State::written), in_older_(chunks, 0) {
    updated_.reserve(chunks);
    older_.reserve(chunks);
  }
  // Another step's updates begin.
  void begin_step() {
    for (const std::uint32_t chunk : updated_) {
      states_[chunk] = State::older;
      if (in_older_[chunk] == 0) older_.push_back(chunk);
      in_older_[chunk] = 1;
    }
    updated_.clear();
  }
  void updated(std::uint32_t chunk) {
    if (states_[chunk] != State::updated) updated_.push_back(chunk);
    states_[chunk] = State::updated;
  }
  // One of the running step's, or with `all` of any; false: there is none.
  bool take(bool all, std::uint32_t* chunk) {
    while (!updated_.empty() || (all && !older_.empty())) {
      const bool from_older = updated_.empty();
      std::vector<std::uint32_t>& list = from_older ? older_ : updated_;
      *chunk = list.back();
      list.pop_back();
      if (from_older) in_older_[*chunk] = 0;
      const bool due = states_[*chunk] == (from_older ? State::older : State::updated);
      if (due) states_[*chunk] = State::written;
      if (due) return true;  // otherwise it has been taken from the other list
    }
    return false;
  }
  bool any_updated() const { return !updated_.empty(); }
  bool empty() const { return updated_.empty() && older_.empty(); }

 private:
  enum class State : std::uint8_t { written, updated, older };
  std::vector<State> states_;
  std::vector<std::uint8_t> in_older_;
  std::vector<std::uint32_t> updated_, older_;
};

}  // namespace ballast::engine
