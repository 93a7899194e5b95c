// HeldStep: a committed step that is being copied while training goes on. Each chunk's slot is held until it has been
// read, by an update or by the copier; a write that falls due there first asks for it, and those that are asked for are
// read first.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "durable/manifest.h"

namespace ballast::engine {

// One thread at a time; allocates at construction only.
class HeldStep {
 public:
  explicit HeldStep(std::size_t chunks) : slots_(chunks, 0), states_(chunks, State::free) { asked_.reserve(chunks); }

  // All chunks, in their slots of that step. Nothing else may be held.
  void hold(std::span<const StoredChunk> chunks) {
    for (std::size_t c = 0; c < slots_.size(); ++c) {
      slots_[c] = chunks[c].slot;
      states_[c] = State::held;
    }
    next_ = 0;
  }
  bool holds(std::uint32_t chunk, std::uint32_t slot) const {
    return states_[chunk] != State::free && slots_[chunk] == slot;
  }
  std::uint32_t slot(std::uint32_t chunk) const { return slots_[chunk]; }
  // Somebody waits for this chunk, which is held.
  void ask_for(std::uint32_t chunk) {
    if (states_[chunk] != State::held) return;
    states_[chunk] = State::asked;
    asked_.push_back(chunk);
  }
  bool any_asked() const { return !asked_.empty(); }
  // Somebody else has read this slot; false: it is not to be copied from there.
  bool take(std::uint32_t chunk, std::uint32_t slot) {
    if (states_[chunk] != State::held || slots_[chunk] != slot) return false;
    states_[chunk] = State::taken;
    return true;
  }
  // The next to be read; false: none is left. It stays held.
  bool next(std::uint32_t* chunk, bool* asked) {
    *asked = !asked_.empty();
    if (*asked) {
      *chunk = asked_.back();
      asked_.pop_back();
      states_[*chunk] = State::taken;
      ++asked_count_;
      return true;
    }
    while (next_ < states_.size() && states_[next_] != State::held) ++next_;
    if (next_ == states_.size()) return false;
    *chunk = next_++;
    states_[*chunk] = State::taken;
    return true;
  }
  void let_go(std::uint32_t chunk) { states_[chunk] = State::free; }
  void let_go_all() {
    for (State& state : states_) state = State::free;
    asked_.clear();
    next_ = 0;
  }
  // Chunks that were copied first as somebody waited for them, of all steps held so far.
  std::uint64_t asked_count() const { return asked_count_; }

 private:
  enum class State : std::uint8_t { free, held, asked, taken };
  std::vector<std::uint8_t> slots_;
  std::vector<State> states_;
  std::vector<std::uint32_t> asked_;
  std::uint32_t next_ = 0;
  std::uint64_t asked_count_ = 0;
};

}  // namespace ballast::engine
