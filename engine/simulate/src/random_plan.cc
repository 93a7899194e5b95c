// Random plans. Everything is drawn from one stream of a counter-based generator, so that a seed means the same plan on
// every machine.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/random.h>
#include <ballast/simulate/random_plan.h>

#include <algorithm>

namespace ballast::simulate {

using schedule::Tier;

namespace {

class Draw {
 public:
  Draw(std::uint64_t seed, const RandomPlanOptions& options)
      : random_(seed), groups_(base::mix(seed + 0x6709)), options_(options) {}

  Plan plan() {
    draw_units();
    if (options_.groups) draw_groups();
    draw_limits();
    usual_style_ = draw_style(false);
    draw_orders(forward_, backward_, false);
    {
      // What the engine is told to expect: the usual pass.
      Plan usual = plan_;
      ProgramWriter writer(usual);
      writer.begin_pass(false);
      write_pass(writer, forward_, backward_, usual_style_, true, false);
      writer.end_pass();
      plan_.expected = record_pass(usual.program, 1, usual.program.size() - 1);
    }
    ProgramWriter writer(plan_);
    const Index steps = 2 + below(3);
    for (Index s = 0; s < steps; ++s) draw_step(writer);
    if (one_in(3)) evaluation(writer);
    writer.settle();
    if (plan_.ranks > 1 && one_in(3)) evaluation(writer);
    draw_slab();
    return std::move(plan_);
  }

 private:
  struct Style {
    bool opens_next = false;       // backward: the next unit's parameters are opened before this one's maths
    bool gradients_first = false;  // gradient scratch is opened before the parameters
    bool release_first = false;    // parameters are released before the gradient is committed
    bool holds_first = false;      // the first unit's parameters are held through forward
  };

  Index below(std::uint64_t bound) { return static_cast<Index>(random_.below(bound)); }
  bool one_in(std::uint64_t n) { return random_.below(n) == 0; }

  void draw_units() {
    static constexpr Timing kTimings[] = {Timing::just_in_time, Timing::eager, Timing::after_backward};
    plan_.timing = kTimings[below(3)];
    plan_.expected_passes = plan_.timing == Timing::eager && one_in(2) ? 1 : 1 + below(3);
    const Index units = 1 + below(8);
    const Index kind = below(5);  // device, host, nvme for all; mixed by unit; mixed by chunk
    const Index chunks_max = 1 + below(options_.ranks > 1 ? 3 : 4);
    const bool several = options_.ranks > 1;
    const bool whole = several && one_in(6);  // stage 0
    plan_.ranks = options_.ranks;
    static constexpr Tier kTiers[] = {Tier::device, Tier::host, Tier::nvme};
    for (Index u = 0; u < units; ++u) {
      schedule::Unit unit;
      unit.first_chunk = static_cast<Index>(plan_.chunks.size());
      unit.chunk_count = 1 + below(chunks_max);
      const Tier of_unit = kTiers[kind < 3 ? kind : below(3)];
      const bool frozen = several && one_in(12);
      unit.gathered = several && !whole;
      unit.reduced = several && !frozen;
      const Index shards = unit.gathered ? plan_.ranks : 1;
      unit.parameter_bytes = of_unit == Tier::device ? 0 : unit.chunk_count * shards;
      unit.gradient_bytes = frozen ? 0 : unit.chunk_count * shards;
      unit.stored_gradients = several || !(plan_.timing == Timing::eager && plan_.expected_passes == 1 &&
                                           of_unit != Tier::device && one_in(2));
      for (Index i = 0; i < unit.chunk_count; ++i) {
        schedule::Chunk chunk;
        chunk.unit = u;
        chunk.parameters = of_unit == Tier::device || kind != 4 ? of_unit : one_in(2) ? Tier::host : Tier::nvme;
        chunk.optimizer = kTiers[kind < 2 && one_in(2) ? kind : below(3)];
        static constexpr Tier kGradients[] = {Tier::device, Tier::host, Tier::host, Tier::nvme};
        chunk.gradients = kGradients[below(4)];
        chunk.trainable = several ? !frozen : !one_in(12);
        chunk.parameter_bytes = 2 * (1 + below(4));
        chunk.optimizer_bytes = 5 * chunk.parameter_bytes;
        chunk.gradient_bytes = 2 * chunk.parameter_bytes;
        plan_.chunks.push_back(chunk);
      }
      plan_.units.push_back(unit);
    }
    tied_ = units > 1 && one_in(4) && plan_.units[0].stored_gradients;
  }

  void draw_groups() {
    base::Random random = groups_;  // of its own: a seed's plan is the same with groups and without
    for (Index u = 0; u < plan_.units.size(); ++u) {
      const auto ranks = static_cast<Index>(1 + random.below(plan_.ranks));
      if (plan_.ranks % ranks == 0) share_among(plan_, u, ranks);
    }
  }

  void draw_limits() {
    schedule::Limits& l = plan_.limits;
    Index chunks_max = 0;
    for (const schedule::Unit& u : plan_.units) chunks_max = std::max(chunks_max, u.chunk_count);
    l.fetch_slots = 1 + below(3);
    l.update_slots = 1 + below(2 * chunks_max + 1);
    l.gradient_slots = 1 + below(2);
    l.reads = 1 + below(3);
    l.writes = 1 + below(3);
    l.copies_in = 1 + below(2);
    l.copies_out = 1 + below(2);
    l.cpu_tasks = 1 + below(2);
    l.entries = 8 + below(24);
    l.jobs = 16 * chunks_max + below(64);
    if (options_.ranks > 1) {
      // Room for what is expected beside what is held: the engine's formula, with less for good measure.
      const auto openings = static_cast<Index>(4 * plan_.units.size() + 2);
      l.entries = 2 * openings + 8 + below(32);
      l.jobs = 6 * chunks_max * openings + 6 * chunks_max + below(64);
    }
    static constexpr Index kRunAhead[] = {0, 0, 1, 3, 1000};
    plan_.run_ahead = kRunAhead[below(5)];
    plan_.look_ahead = !one_in(16);
  }

  Style draw_style(bool deviates) {
    Style style;
    if (one_in(deviates ? 2 : 4)) style.opens_next = true;
    if (one_in(4)) style.gradients_first = true;
    if (one_in(4)) style.release_first = true;
    if (one_in(8)) style.holds_first = true;
    // One chunk's update slot or gradient slot may be held for each unit that is open: see the header of the scheduler.
    return style;
  }

  void draw_orders(std::vector<Index>& forward, std::vector<Index>& backward, bool deviates) {
    const auto units = static_cast<Index>(plan_.units.size());
    forward.clear();
    backward.clear();
    for (Index u = 0; u < units; ++u) forward.push_back(u);
    if (tied_) forward.push_back(0);
    backward.assign(forward.rbegin(), forward.rend());
    if (!deviates) return;
    for (std::vector<Index>* order : {&forward, &backward}) {
      if (one_in(3) && order->size() > 1) order->erase(order->begin() + below(order->size()));
      if (one_in(3) && order->size() > 1) {
        std::swap((*order)[below(order->size())], (*order)[below(order->size())]);
      }
      if (one_in(6) && order == &forward) order->push_back(below(units));
    }
  }

  // What is wrong with a pass, where something is: a gradient given up, chunks without gradients.
  void write_pass(ProgramWriter& writer, const std::vector<Index>& forward, const std::vector<Index>& backward,
                  const Style& style, bool last_pass, bool deviates) {
    Index held = kNone;
    for (std::size_t i = 0; i < forward.size(); ++i) {
      const Index u = forward[i];
      if (i == 0 && style.holds_first) {
        held = writer.open_parameters(u);
        writer.compute(u);
      } else {
        writer.forward(u);
      }
    }
    if (held != kNone) writer.release(held);
    Index next = kNone;  // handle of the next unit's parameters
    for (std::size_t i = 0; i < backward.size(); ++i) {
      const Index u = backward[i];
      if (plan_.ranks > 1 && one_in(20) && deviates) writer.take_back();
      if (plan_.units[u].gradient_bytes == 0) {
        if (next != kNone) {
          writer.compute(u);
          writer.release(next);
          next = kNone;
        } else {
          writer.forward(u);
        }
        continue;
      }
      const bool again = std::count(backward.begin() + static_cast<std::ptrdiff_t>(i) + 1, backward.end(), u) != 0;
      Index parameters = next, gradients = kNone;
      next = kNone;
      if (style.gradients_first) gradients = writer.open_gradients(u);
      if (parameters == kNone) parameters = writer.open_parameters(u);
      if (gradients == kNone) gradients = writer.open_gradients(u);
      const bool more = i + 1 < backward.size();
      if (style.opens_next && more && backward[i + 1] != u) next = writer.open_parameters(backward[i + 1]);
      writer.compute(u);
      if (style.release_first) writer.release(parameters);
      const bool once = std::count(backward.begin(), backward.end(), u) == 1;
      if (deviates && one_in(12) && (once || plan_.ranks == 1)) {
        writer.give_up(gradients);
      } else {
        writer.commit(gradients, last_pass && !again, one_in(5) ? static_cast<std::uint32_t>(random_.next()) : ~0u);
        if (plan_.ranks > 1 && one_in(40)) writer.take_back();
      }
      if (!style.release_first) writer.release(parameters);
    }
  }

  void evaluation(ProgramWriter& writer) {
    if (one_in(2)) {
      writer.evaluation_pass();
      return;
    }
    writer.begin_pass(true);
    const Index count = 1 + below(plan_.units.size());
    for (Index i = 0; i < count; ++i) writer.forward(below(plan_.units.size()));
    writer.end_pass();
  }

  void draw_step(ProgramWriter& writer) {
    const bool may = options_.deviations;
    if (may && one_in(6)) evaluation(writer);
    if (may && one_in(10)) writer.settle();
    const bool any_unstored = std::any_of(plan_.units.begin(), plan_.units.end(),
                                          [](const schedule::Unit& u) { return !u.stored_gradients; });
    const Index passes = may && !any_unstored && one_in(8) ? 1 + below(3) : plan_.expected_passes;
    writer.begin_step(passes);
    for (Index p = 0; p < passes; ++p) {
      writer.begin_pass(false);
      if (may && one_in(4)) {
        std::vector<Index> forward, backward;
        draw_orders(forward, backward, true);
        // A unit whose gradients are consumed at once commits once.
        write_pass(writer, forward, backward, draw_style(true), p + 1 == passes, true);
      } else {
        write_pass(writer, forward_, backward_, usual_style_, p + 1 == passes, may && one_in(6));
      }
      writer.end_pass();
      if (may && plan_.timing != Timing::eager && one_in(12)) evaluation(writer);
    }
    if (may && plan_.ranks > 1 && one_in(6)) writer.take_back();
    writer.decide(plan_.timing == Timing::eager || !one_in(4), plan_.ranks > 1 && one_in(2));
  }

  // The least that every pass can do with, and more; ample where units are placed on demand beside others.
  void draw_slab() {
    std::uint64_t largest = 1;
    for (const schedule::Unit& u : plan_.units) {
      largest = std::max({largest, u.parameter_bytes, u.gradient_bytes});
    }
    std::uint64_t needed = smallest_slab(plan_, plan_.expected);
    bool deviates = false;
    std::size_t begin = 0;
    for (std::size_t i = 0; i < plan_.program.size(); ++i) {
      if (plan_.program[i].verb == Verb::begin_pass) begin = i + 1;
      if (plan_.program[i].verb == Verb::settle ||
          (plan_.program[i].verb == Verb::begin_pass && plan_.program[i].flag)) {
        deviates = true;
      }
      if (plan_.program[i].verb != Verb::end_pass) continue;
      const std::vector<Access> pass = record_pass(plan_.program, begin, i);
      deviates |= pass.size() != plan_.expected.size();
      needed = std::max(needed, smallest_slab(plan_, pass));
    }
    deviates |= options_.deviations;
    plan_.slab_bytes = needed;
    if (deviates) plan_.slab_bytes = std::max(needed, 9 * largest);
    if (one_in(3)) plan_.slab_bytes += below(3 * needed + 1);
  }

  base::Random random_, groups_;
  RandomPlanOptions options_;
  Plan plan_;
  Style usual_style_;
  std::vector<Index> forward_, backward_;
  bool tied_ = false;
};

}  // namespace

Plan random_plan(std::uint64_t seed, const RandomPlanOptions& options) {
  Plan plan = Draw(seed, options).plan();
  static const char* const kTimings[] = {"just in time", "eager", "after backward"};
  plan.text = "random plan of seed " + std::to_string(seed) + ": " +
              (plan.ranks > 1 ? std::to_string(plan.ranks) + " ranks, " : "") + std::to_string(plan.units.size()) +
              " units, " + std::to_string(plan.chunks.size()) + " chunks, " + kTimings[static_cast<int>(plan.timing)] +
              ", " + std::to_string(plan.expected_passes) + " passes, slots " +
              std::to_string(plan.limits.fetch_slots) + "/" + std::to_string(plan.limits.update_slots) + "/" +
              std::to_string(plan.limits.gradient_slots) + ", entries " + std::to_string(plan.limits.entries) +
              ", jobs " + std::to_string(plan.limits.jobs) + ", slab " + std::to_string(plan.slab_bytes) +
              ", run ahead " + std::to_string(plan.run_ahead);
  return plan;
}

}  // namespace ballast::simulate
