// The truth beside the scheduler: every place that can hold a chunk's bytes, with version numbers for bytes. Tasks read
// and write it as they start and finish, and what does not fit is an error: read before written, written while read, an
// old version, a gradient with the wrong contributions.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/simulate/plan.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace ballast::simulate {

// What a place holds. Compared as a whole; `torn` while it is being written.
struct Content {
  enum class What : std::uint8_t { nothing, parameters, states, gradient, local };  // local: not yet reduced
  What what = What::nothing;
  bool torn = false;
  std::uint16_t chunk = 0;   // several ranks: + chunks * (the shard's rank - this rank, modulo ranks)
  std::uint16_t number = 0;  // parameters, states: version; gradient: step
  std::uint32_t mask = 0;    // gradient: contributions in it
  friend bool operator==(const Content&, const Content&) = default;
};

class ModelWorld {
 public:
  ModelWorld() = default;
  explicit ModelWorld(const Plan& plan);

  // A task begins: its inputs are checked and remembered, its outputs are torn. Finished: inputs are still the same.
  void start(const schedule::Action& action);
  void finish(std::size_t in_flight);
  struct Flight {
    schedule::Action action;
    std::array<Content, 3> inputs;
    std::array<std::uint32_t, 3> places;  // of inputs
    std::uint8_t input_count = 0;
  };
  const std::vector<Flight>& in_flight() const { return in_flight_; }

  // Several ranks. A collective begins: returns what this rank brings to it, by chunk of the unit. It ends: what every
  // rank brought, from this rank on upward (modulo ranks).
  std::vector<Content> start_collective(const schedule::Action& action);
  void finish_collective(std::size_t in_flight, std::span<const std::vector<Content>* const> brought);

  // The trainer computes on a unit. offset of its parameters (kNone: none open), of its gradient scratch, likewise.
  void start_compute(Index unit, std::uint64_t parameters, std::uint64_t gradients, bool reads, bool writes);
  void finish_compute(Index unit, std::uint64_t parameters, std::uint64_t gradients, bool reads, bool writes);
  // A commit: chunk contributions are numbered within the step. Returns what the scratch now holds is in `mask` only.
  void commit(Index unit, std::uint64_t gradients, std::span<const bool> contributes, bool last, bool eager);
  void decide(bool update);
  // At the end: every chunk has the version that the decisions add up to, everywhere it lives.
  void finish_run(const schedule::Scheduler& scheduler);

  std::uint16_t version(Index chunk) const { return truth_[chunk].version; }
  const std::string& error() const { return error_; }
  void fail(std::string text) {
    if (error_.empty()) error_ = std::move(text);
  }
  // What behaviour depends on, with slots in the order given.
  void serialize(std::vector<std::uint32_t>& out, const std::vector<std::pair<schedule::SlotKind, Index>>& slots,
                 const std::vector<Index>& jobs) const;

 private:
  struct Truth {
    std::uint16_t version = 0;    // decided so far
    std::uint16_t step = 0;       // of the gradient that is decided and not consumed yet
    std::uint32_t owed_mask = 0;  // its contributions
    std::uint32_t mask = 0;       // contributions of the running step
    bool contributed = false, eager = false;
    std::uint16_t updates = 0;
  };
  // Places, one index for each.
  std::uint32_t parameters_home(Index c) const { return c; }
  std::uint32_t states_home(Index c) const { return chunk_count_ + c; }
  std::uint32_t gradient_home(Index c) const { return 2 * chunk_count_ + c; }
  // Of the shard of the rank that is `shard` after this one: a chunk of parameters that live on the device.
  std::uint32_t whole_home(Index c, Index shard) const {
    return shard == 0 ? parameters_home(c) : peers_at_ + (shard - 1) * chunk_count_ + c;
  }
  std::uint32_t parameters_place(const schedule::Unit& u, std::uint64_t offset, Index i, Index shard) const {
    return u.parameter_bytes == 0 ? whole_home(u.first_chunk + i, shard) : cell(offset + shard * u.chunk_count + i);
  }
  // What a slot holds. Gradient slots: a sum, and beside it a contribution that is to be added.
  static constexpr std::uint32_t kParameters = 0, kStates = 1, kGradient = 2, kSum = 0, kIncoming = 1, kSlotParts = 3;
  std::uint32_t slot_place(schedule::SlotKind kind, Index slot, std::uint32_t part) const;
  std::uint32_t copied_to(const schedule::Action& action) const;
  std::uint32_t cell(std::uint64_t offset) const { return cells_at_ + static_cast<std::uint32_t>(offset); }
  Content read(std::uint32_t place, const char* by, Index chunk);
  void input(Flight& flight, std::uint32_t place, const char* by);
  void expect(const Content& found, const Content& wanted, const char* by);
  void tear(std::uint32_t place, const char* by);
  void hold(std::uint32_t place) { ++readers_[place]; }
  void check_gradient(const Content& gradient, Index chunk);
  Content scratch_of(const schedule::Unit& unit, Index chunk, std::uint32_t mask) const;
  std::string place_name(std::uint32_t place) const;

  const Plan* plan_ = nullptr;
  Index chunk_count_ = 0;
  std::uint32_t slots_at_[4] = {};
  std::uint32_t cells_at_ = 0, peers_at_ = 0;
  std::vector<Content> places_;
  std::vector<std::uint8_t> writers_;  // of each place: at most one, and then no readers
  std::vector<std::uint8_t> readers_;
  std::vector<Truth> truth_;
  std::vector<Flight> in_flight_;
  std::uint16_t step_ = 0;
  std::string error_;
};

}  // namespace ballast::simulate
