// The truth beside the scheduler.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/simulate/model_world.h>

#include <algorithm>
#include <bit>

namespace ballast::simulate {

using schedule::Action;
using schedule::JobKind;
using schedule::SlotKind;
using schedule::Task;
using schedule::Tier;
using What = Content::What;

namespace {

Content parameters_of(Index chunk, std::uint32_t version) {
  return {What::parameters, false, static_cast<std::uint16_t>(chunk), static_cast<std::uint16_t>(version), 0};
}
Content states_of(Index chunk, std::uint32_t version) {
  return {What::states, false, static_cast<std::uint16_t>(chunk), static_cast<std::uint16_t>(version), 0};
}
Content gradient_of(Index chunk, std::uint32_t step, std::uint32_t mask) {
  return {What::gradient, false, static_cast<std::uint16_t>(chunk), static_cast<std::uint16_t>(step), mask};
}

std::string to_text(const Content& c) {
  static const char* const kNames[] = {"nothing", "parameters", "states", "gradient", "gradient of this rank alone"};
  std::string text = kNames[static_cast<int>(c.what)];
  if (c.what != What::nothing) {
    text += " of chunk " + std::to_string(c.chunk) + (c.what >= What::gradient ? ", step " : ", version ") +
            std::to_string(c.number);
  }
  if (c.what >= What::gradient) text += ", contributions " + std::to_string(c.mask);
  return text + (c.torn ? ", half written" : "");
}

}  // namespace

ModelWorld::ModelWorld(const Plan& plan) : plan_(&plan), chunk_count_(static_cast<Index>(plan.chunks.size())) {
  slots_at_[1] = 3 * chunk_count_;
  slots_at_[2] = slots_at_[1] + kSlotParts * plan.limits.fetch_slots;
  slots_at_[3] = slots_at_[2] + kSlotParts * plan.limits.update_slots;
  cells_at_ = slots_at_[3] + kSlotParts * plan.limits.gradient_slots;
  peers_at_ = cells_at_ + static_cast<std::uint32_t>(plan.slab_bytes);
  places_.resize(peers_at_ + (plan.ranks - 1) * chunk_count_);
  writers_.resize(places_.size());
  readers_.resize(places_.size());
  truth_.resize(chunk_count_);
  for (Index c = 0; c < chunk_count_; ++c) {
    places_[parameters_home(c)] = parameters_of(c, 0);
    places_[states_home(c)] = states_of(c, 0);
  }
}

std::uint32_t ModelWorld::slot_place(SlotKind kind, Index slot, std::uint32_t part) const {
  return slots_at_[static_cast<int>(kind)] + kSlotParts * slot + part;
}

std::string ModelWorld::place_name(std::uint32_t place) const {
  if (place >= peers_at_) return "another rank's parameters " + std::to_string((place - peers_at_) % chunk_count_);
  if (place >= cells_at_) return "device byte " + std::to_string(place - cells_at_);
  static const char* const kHomes[] = {"home of parameters ", "home of states ", "home of gradient "};
  if (place < 3 * chunk_count_) return kHomes[place / chunk_count_] + std::to_string(place % chunk_count_);
  int kind = 3;
  while (place < slots_at_[kind]) --kind;
  static const char* const kSlots[] = {"", "fetch slot ", "update slot ", "gradient slot "};
  return kSlots[kind] + std::to_string((place - slots_at_[kind]) / kSlotParts);
}

void ModelWorld::expect(const Content& found, const Content& wanted, const char* by) {
  if (found == wanted || !error_.empty()) return;
  fail(std::string(by) + ": found " + to_text(found) + ", wanted " + to_text(wanted));
}

Content ModelWorld::read(std::uint32_t place, const char* by, Index chunk) {
  const Content content = places_[place];
  if (content.torn || content.what == What::nothing || content.what == What::local || content.chunk != chunk) {
    fail(std::string(by) + " of chunk " + std::to_string(chunk) + ": " + place_name(place) + " holds " +
         to_text(content));
  }
  return content;
}

void ModelWorld::input(Flight& flight, std::uint32_t place, const char* by) {
  flight.inputs[flight.input_count] = read(place, by, flight.action.chunk);
  flight.places[flight.input_count++] = place;
  hold(place);
}

void ModelWorld::tear(std::uint32_t place, const char* by) {
  if (writers_[place]++ != 0) fail(std::string(by) + ": " + place_name(place) + " is being written by another");
  if (readers_[place] != 0) fail(std::string(by) + ": " + place_name(place) + " is being read");
  places_[place].torn = true;
}

void ModelWorld::check_gradient(const Content& gradient, Index chunk) {
  expect(gradient, gradient_of(chunk, truth_[chunk].step, truth_[chunk].owed_mask), "update with a gradient");
}

// A contribution goes to its gradient's place where nothing is there yet; otherwise beside it, to be added.
std::uint32_t ModelWorld::copied_to(const Action& action) const {
  if (action.slot == kNone) return gradient_home(action.chunk);
  const schedule::Chunk& chunk = plan_->chunks[action.chunk];
  const bool on_nvme = chunk.gradients == Tier::nvme && plan_->units[chunk.unit].stored_gradients;
  return slot_place(SlotKind::gradient, action.slot, on_nvme && !action.first ? kIncoming : kSum);
}

void ModelWorld::start(const Action& action) {
  const Index c = action.chunk;
  if (c == kNone) return fail("a collective in a world of one rank");
  const schedule::Chunk& chunk = plan_->chunks[c];
  const schedule::Unit& unit = plan_->units[chunk.unit];
  const Index in_unit = c - unit.first_chunk;
  Flight flight;
  flight.action = action;
  const bool parameters_nvme = chunk.parameters == Tier::nvme;
  const bool states_nvme = chunk.optimizer == Tier::nvme;
  const bool gradient_nvme = chunk.gradients == Tier::nvme && unit.stored_gradients;
  switch (action.task) {
    case Task::read: {
      if (action.slot == kNone) fail("read without a slot");
      if (action.job_kind == JobKind::gradient) {
        input(flight, gradient_home(c), "read of a sum");
        tear(slot_place(SlotKind::gradient, action.slot, kSum), "read of a sum");
        break;
      }
      const bool states = action.job_kind == JobKind::update && states_nvme;
      if (parameters_nvme) input(flight, parameters_home(c), "read");
      if (states) input(flight, states_home(c), "read");
      if (parameters_nvme) tear(slot_place(action.slot_kind, action.slot, kParameters), "read");
      if (states) tear(slot_place(action.slot_kind, action.slot, kStates), "read");
      if (flight.input_count == 0) fail("read of nothing");
      break;
    }
    case Task::read_gradient:
      input(flight, gradient_home(c), "read of a gradient");
      check_gradient(flight.inputs[0], c);
      tear(slot_place(SlotKind::update, action.slot, kGradient), "read of a gradient");
      break;
    case Task::copy_in:
      input(flight, parameters_nvme ? slot_place(action.slot_kind, action.slot, kParameters) : parameters_home(c),
            "copy in");
      tear(cell(action.device_offset + in_unit), "copy in");
      break;
    case Task::update: {
      const bool stored = action.gradient_slot == kNone;
      if (stored != unit.stored_gradients) fail("update with its gradient in the wrong kind of place");
      const std::uint32_t parameters =
          parameters_nvme ? slot_place(SlotKind::update, action.slot, kParameters) : parameters_home(c);
      const std::uint32_t states = states_nvme ? slot_place(SlotKind::update, action.slot, kStates) : states_home(c);
      input(flight,
            gradient_nvme ? slot_place(SlotKind::update, action.slot, kGradient)
            : stored      ? gradient_home(c)
                          : slot_place(SlotKind::gradient, action.gradient_slot, kSum),
            "update");
      expect(read(parameters, "update", c), parameters_of(c, truth_[c].updates), "update");
      expect(read(states, "update", c), states_of(c, truth_[c].updates), "update");
      if (truth_[c].updates >= truth_[c].version) fail("update of chunk " + std::to_string(c) + " that is not due");
      check_gradient(flight.inputs[0], c);
      tear(parameters, "update");
      tear(states, "update");
      break;
    }
    case Task::write:
      if (action.job_kind == JobKind::gradient) {
        input(flight, slot_place(SlotKind::gradient, action.slot, kSum), "write of a sum");
        tear(gradient_home(c), "write of a sum");
        break;
      }
      if (parameters_nvme) {
        input(flight, slot_place(SlotKind::update, action.slot, kParameters), "write");
        expect(flight.inputs[0], parameters_of(c, truth_[c].updates), "write");
        tear(parameters_home(c), "write");
      }
      if (states_nvme) {
        input(flight, slot_place(SlotKind::update, action.slot, kStates), "write");
        tear(states_home(c), "write");
      }
      break;
    case Task::copy_out:
      input(flight, cell(action.device_offset + in_unit), "copy out");
      tear(copied_to(action), "copy out");
      if (action.slot == kNone && !action.first) fail("copy out over earlier contributions");
      break;
    case Task::accumulate: {
      const bool on_device = chunk.gradients == Tier::device && unit.stored_gradients;
      if (gradient_nvme) {
        input(flight, copied_to(action), "accumulate");
        if (action.first) break;
        const std::uint32_t sum = slot_place(SlotKind::gradient, action.slot, kSum);
        read(sum, "accumulate", c);
        tear(sum, "accumulate");
        break;
      }
      if (on_device) {
        input(flight, cell(action.device_offset + in_unit), "accumulate");
      } else if (action.slot != kNone) {
        input(flight, slot_place(SlotKind::gradient, action.slot, kSum), "accumulate");
      } else {
        input(flight, gradient_home(c), "accumulate");
        break;
      }
      if (unit.stored_gradients) {
        if (!action.first) read(gradient_home(c), "accumulate", c);
        tear(gradient_home(c), "accumulate");
      }
      break;
    }
    case Task::gather:
    case Task::reduce:
      BALLAST_CHECK(false);
  }
  in_flight_.push_back(flight);
}

void ModelWorld::finish(std::size_t index) {
  const Flight flight = in_flight_[index];
  in_flight_.erase(in_flight_.begin() + static_cast<std::ptrdiff_t>(index));
  const Action& action = flight.action;
  const Index c = action.chunk;
  const schedule::Chunk& chunk = plan_->chunks[c];
  const schedule::Unit& unit = plan_->units[chunk.unit];
  const Index in_unit = c - unit.first_chunk;
  const bool parameters_nvme = chunk.parameters == Tier::nvme;
  const bool states_nvme = chunk.optimizer == Tier::nvme;
  const bool gradient_nvme = chunk.gradients == Tier::nvme && unit.stored_gradients;
  for (std::uint8_t i = 0; i < flight.input_count; ++i) {
    --readers_[flight.places[i]];
    expect(places_[flight.places[i]], flight.inputs[i], "bytes changed under a task");
  }
  const auto write = [&](std::uint32_t place, const Content& content) {
    --writers_[place];
    places_[place] = content;
  };
  switch (action.task) {
    case Task::read: {
      std::uint8_t i = 0;
      if (action.job_kind == JobKind::gradient) {
        write(slot_place(SlotKind::gradient, action.slot, kSum), flight.inputs[0]);
        break;
      }
      if (parameters_nvme) write(slot_place(action.slot_kind, action.slot, kParameters), flight.inputs[i++]);
      if (action.job_kind == JobKind::update && states_nvme) {
        write(slot_place(action.slot_kind, action.slot, kStates), flight.inputs[i]);
      }
      break;
    }
    case Task::read_gradient:
      write(slot_place(SlotKind::update, action.slot, kGradient), flight.inputs[0]);
      break;
    case Task::copy_in:
      write(cell(action.device_offset + in_unit), flight.inputs[0]);
      break;
    case Task::update: {
      ++truth_[c].updates;
      write(parameters_nvme ? slot_place(SlotKind::update, action.slot, kParameters) : parameters_home(c),
            parameters_of(c, truth_[c].updates));
      write(states_nvme ? slot_place(SlotKind::update, action.slot, kStates) : states_home(c),
            states_of(c, truth_[c].updates));
      break;
    }
    case Task::write: {
      std::uint8_t i = 0;
      if (action.job_kind == JobKind::gradient) {
        write(gradient_home(c), flight.inputs[0]);
        break;
      }
      if (parameters_nvme) write(parameters_home(c), flight.inputs[i++]);
      if (states_nvme) write(states_home(c), flight.inputs[i]);
      break;
    }
    case Task::copy_out:
      write(copied_to(action), flight.inputs[0]);
      break;
    case Task::accumulate: {
      const bool on_device = chunk.gradients == Tier::device && unit.stored_gradients;
      if (!unit.stored_gradients || (!on_device && action.slot == kNone) || (gradient_nvme && action.first)) break;
      const std::uint32_t home = gradient_nvme ? slot_place(SlotKind::gradient, action.slot, kSum) : gradient_home(c);
      Content sum = flight.inputs[0];
      if (!action.first) {
        const Content& before = places_[home];
        if (before.number != sum.number) fail("gradients of two steps are added");
        if ((before.mask & sum.mask) != 0) fail("a contribution is added twice");
        sum.mask |= before.mask;
      }
      write(home, sum);
      break;
    }
    case Task::gather:
    case Task::reduce:
      break;
  }
}

std::vector<Content> ModelWorld::start_collective(const Action& action) {
  const schedule::Unit& u = plan_->units[action.unit];
  std::vector<Content> brought;
  const bool gather = action.task == Task::gather;
  const Index shards = shards_of(*plan_, action.unit);
  for (Index i = 0; i < u.chunk_count; ++i) {
    const Index c = u.first_chunk + i;
    if (gather) {
      const std::uint32_t own = parameters_place(u, action.device_offset, i, 0);
      brought.push_back(places_[own]);
      const Content& content = places_[own];
      if (content.torn || content.what != What::parameters || content.chunk != c) {
        fail("gather of unit " + std::to_string(action.unit) + ": " + place_name(own) + " holds " + to_text(content));
      }
      hold(own);
      for (Index s = 1; s < shards; ++s) tear(parameters_place(u, action.device_offset, i, s), "gather");
      continue;
    }
    for (Index s = 0; s < shards; ++s) {
      const std::uint32_t place = cell(action.device_offset + s * u.chunk_count + i);
      const Content& content = places_[place];
      if (content.torn || content.what != What::local || content.chunk != c + s * chunk_count_ ||
          content.number != step_ || content.mask != places_[cell(action.device_offset + i)].mask) {
        fail("reduction of unit " + std::to_string(action.unit) + ": " + place_name(place) + " holds " +
             to_text(content));
      }
      if (s == 0) brought.push_back(content);
      tear(place, "reduction");
    }
  }
  Flight flight;
  flight.action = action;
  flight.input_count = 0;
  in_flight_.push_back(flight);
  return brought;
}

void ModelWorld::finish_collective(std::size_t index, std::span<const std::vector<Content>* const> brought) {
  const Action action = in_flight_[index].action;
  in_flight_.erase(in_flight_.begin() + static_cast<std::ptrdiff_t>(index));
  const schedule::Unit& u = plan_->units[action.unit];
  const Index shards = shards_of(*plan_, action.unit);
  const auto write = [&](std::uint32_t place, const Content& content) {
    --writers_[place];
    places_[place] = content;
  };
  for (Index i = 0; i < u.chunk_count; ++i) {
    const Index c = u.first_chunk + i;
    if (action.task == Task::gather) {
      const std::uint32_t own = parameters_place(u, action.device_offset, i, 0);
      --readers_[own];
      expect(places_[own], (*brought[0])[i], "bytes changed under a gather");
      for (Index s = 1; s < shards; ++s) {
        Content content = (*brought[s])[i];
        content.chunk = static_cast<std::uint16_t>(content.chunk + s * chunk_count_);
        write(parameters_place(u, action.device_offset, i, s), content);
      }
      continue;
    }
    const Content& mine = (*brought[0])[i];
    for (const std::vector<Content>* other : brought) expect((*other)[i], mine, "reduction with what another brought");
    for (Index s = 0; s < shards; ++s) {
      write(cell(action.device_offset + s * u.chunk_count + i),
            s == 0 ? gradient_of(c, mine.number, mine.mask) : Content{});
    }
  }
}

void ModelWorld::start_compute(Index unit, std::uint64_t parameters, std::uint64_t gradients, bool reads, bool writes) {
  const schedule::Unit& u = plan_->units[unit];
  for (Index i = 0; i < u.chunk_count; ++i) {
    const Index c = u.first_chunk + i;
    for (Index s = 0; s < shards_of(*plan_, unit); ++s) {
      if (reads) {
        const std::uint32_t place = parameters_place(u, parameters, i, s);
        expect(places_[place], parameters_of(c + s * chunk_count_, truth_[c].version), "compute");
        hold(place);
      }
      if (writes) tear(cell(gradients + s * u.chunk_count + i), "compute");
    }
  }
}

void ModelWorld::finish_compute(Index unit, std::uint64_t parameters, std::uint64_t gradients, bool reads,
                                bool writes) {
  const schedule::Unit& u = plan_->units[unit];
  for (Index i = 0; i < u.chunk_count; ++i) {
    const Index c = u.first_chunk + i;
    for (Index s = 0; s < shards_of(*plan_, unit); ++s) {
      if (reads) {
        const std::uint32_t place = parameters_place(u, parameters, i, s);
        expect(places_[place], parameters_of(c + s * chunk_count_, truth_[c].version), "end of compute");
        --readers_[place];
      }
      if (writes) {
        const std::uint32_t place = cell(gradients + s * u.chunk_count + i);
        --writers_[place];
        places_[place] = scratch_of(u, c + s * chunk_count_, 1);
      }
    }
  }
}

// What a rank's own gradient scratch holds.
Content ModelWorld::scratch_of(const schedule::Unit& unit, Index chunk, std::uint32_t mask) const {
  Content content = gradient_of(chunk, step_, mask);
  if (unit.reduced) content.what = What::local;
  return content;
}

void ModelWorld::commit(Index unit, std::uint64_t gradients, std::span<const bool> contributes, bool last, bool eager) {
  const schedule::Unit& u = plan_->units[unit];
  for (Index i = 0; i < u.chunk_count; ++i) {
    const Index c = u.first_chunk + i;
    Truth& truth = truth_[c];
    if (!plan_->chunks[c].trainable) continue;
    // What the scratch holds is this contribution: the next bit. An absent one is zeros; those beyond the thirtieth of
    // a step are not told apart.
    const int before = std::popcount(truth.mask);
    const std::uint32_t bit = contributes[i] && before < 30 ? 1u << before : 0;
    for (Index s = 0; s < shards_of(*plan_, unit); ++s) {
      Content& scratch = places_[cell(gradients + s * u.chunk_count + i)];
      if (contributes[i]) expect(scratch, scratch_of(u, c + s * chunk_count_, 1), "commit");
      scratch = scratch_of(u, c + s * chunk_count_, bit);
    }
    if (contributes[i]) {
      truth.mask |= bit;
      truth.contributed = true;
    }
    if (last && eager && truth.contributed) {
      truth.eager = true;
      if (truth.updates != truth.version) fail("a commit while the unit's update is not done");
      ++truth.version;
      truth.step = step_;
      truth.owed_mask = truth.mask;
    }
  }
}

void ModelWorld::decide(bool update) {
  for (Truth& truth : truth_) {
    if (truth.contributed && !truth.eager && update) {
      if (truth.updates != truth.version) fail("a decision while an earlier update is not done");
      ++truth.version;
      truth.step = step_;
      truth.owed_mask = truth.mask;
    }
    truth.mask = 0;
    truth.contributed = false;
    truth.eager = false;
  }
  ++step_;
}

void ModelWorld::finish_run(const schedule::Scheduler& scheduler) {
  for (Index c = 0; c < chunk_count_; ++c) {
    if (truth_[c].updates != truth_[c].version || scheduler.updates_done(c) != truth_[c].version) {
      fail("chunk " + std::to_string(c) + ": " + std::to_string(truth_[c].updates) + " updates of " +
           std::to_string(truth_[c].version));
    }
    expect(places_[parameters_home(c)], parameters_of(c, truth_[c].version), "end of the run");
    expect(places_[states_home(c)], states_of(c, truth_[c].version), "end of the run");
  }
}

void ModelWorld::serialize(std::vector<std::uint32_t>& out, const std::vector<std::pair<SlotKind, Index>>& slots,
                           const std::vector<Index>& jobs) const {
  const auto put = [&](std::uint32_t place) {
    const Content& c = places_[place];
    if (c.what == What::nothing) {
      out.push_back(c.torn ? 1 : 0);
      return;
    }
    out.push_back(static_cast<std::uint32_t>(c.what) | static_cast<std::uint32_t>(c.torn) << 3 |
                  static_cast<std::uint32_t>(c.chunk) << 4 | static_cast<std::uint32_t>(c.number) << 16);
    if (c.what >= What::gradient) out.push_back(c.mask);
  };
  for (std::uint32_t place = 0; place < 3 * chunk_count_; ++place) put(place);
  for (const auto& [kind, slot] : slots) {
    for (std::uint32_t part = 0; part < kSlotParts; ++part) put(slot_place(kind, slot, part));
  }
  for (std::uint32_t place = cells_at_; place < places_.size(); ++place) put(place);
  for (const Truth& t : truth_) {
    out.push_back(t.version | static_cast<std::uint32_t>(t.updates) << 16);
    out.push_back(t.mask | static_cast<std::uint32_t>(t.contributed) << 30 | static_cast<std::uint32_t>(t.eager) << 31);
  }
  // Tasks in flight are in the scheduler's words; what they read was checked as they began, and their actions follow
  // from their jobs, but for a read that began as an update and has become a fetch.
  std::vector<std::uint32_t> flights;
  for (const Flight& flight : in_flight_) {
    const auto at = std::find(jobs.begin(), jobs.end(), flight.action.job) - jobs.begin();
    flights.push_back(static_cast<std::uint32_t>(at) << 8 | static_cast<std::uint32_t>(flight.action.task) << 4 |
                      static_cast<std::uint32_t>(flight.action.job_kind));
  }
  std::sort(flights.begin(), flights.end());
  out.insert(out.end(), flights.begin(), flights.end());
}

}  // namespace ballast::simulate
