// What deciding costs: nanoseconds per task of the scheduler (everything a task needs: its entry, its slots, its start
// and its end), and compiling the static device map of large models.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/schedule/device_map.h>
#include <ballast/schedule/scheduler.h>
#include <ballast/simulate/simulator.h>
#include <benchmark/benchmark.h>

#include <array>
#include <deque>
#include <memory>
#include <vector>

namespace ballast::schedule {
namespace {

// What a whole step of a model is like.
struct Shape {
  Index units = 1, chunks = 1;
  Tier tier = Tier::nvme;  // of parameters and optimizer states
  Index window_units = 8;  // that fit the device beside each other, with their gradients
  std::size_t lag = 0;     // openings by which the device is behind the trainer
};

// Forward over all units, backward in reverse, just in time, looking a whole step ahead.
struct Trainer {
  struct Use {
    Index unit;
    bool gradient;
    std::uint64_t offset;
  };

  explicit Trainer(const Shape& shape) : lag(shape.lag) {
    const Index units = shape.units, chunks = shape.chunks;
    std::vector<Chunk> all;
    std::vector<Unit> list;
    for (Index u = 0; u < units; ++u) {
      list.push_back({u * chunks, chunks, 2 * chunks, 4 * chunks, true});
      for (Index c = 0; c < chunks; ++c) all.push_back({u, shape.tier, shape.tier});
    }
    std::vector<Opening> openings;
    std::uint32_t now = 0;
    const auto use = [&](Index u, bool backward) {
      openings.push_back({u, false, 2 * chunks, now, now + (backward ? 3 : 1)});
      if (backward) openings.push_back({u, true, 4 * chunks, now + 1, now + 2});
      now += backward ? 4 : 2;
    };
    for (Index u = 0; u < units; ++u) use(u, false);
    for (Index u = units; u-- > 0;) use(u, true);
    const std::uint64_t slab = std::uint64_t{2} * chunks * shape.window_units + 8 * chunks;
    const DeviceMap map = compile_device_map(openings, slab);
    for (std::size_t i = 0; i < openings.size(); ++i) {
      pass.push_back({openings[i].unit, openings[i].gradient, map.offsets[i]});
    }
    Limits limits;
    limits.fetch_slots = 8;
    limits.update_slots = 16;
    limits.gradient_slots = 4;
    limits.entries = 2 * static_cast<Index>(pass.size()) + 64;
    limits.jobs = 12 * units * chunks;
    scheduler = std::make_unique<Scheduler>(std::move(all), std::move(list), limits);
    contributes = std::make_unique<bool[]>(chunks);
    std::fill_n(contributes.get(), chunks, true);
    chunk_count = chunks;
  }

  // Runs tasks until the entry is ready; a task ends as soon as it has begun.
  void until_ready(Index entry) {
    std::array<Action, 16> actions;
    while (!scheduler->ready(entry)) run(actions);
  }
  void run(std::array<Action, 16>& actions) {
    const std::size_t count = scheduler->next(actions);
    BALLAST_CHECK(count != 0);
    for (std::size_t i = 0; i < count; ++i) scheduler->finished(actions[i]);
    tasks += count;
  }
  void look_ahead() {
    while (ahead < at + pass.size()) {
      const std::size_t place = ahead % pass.size();
      const Use& u = pass[place];
      const bool next_step = ahead / pass.size() != at / pass.size();
      const Form form = next_step && place < pass.size() / 3 ? Form::update_expected : Form::fetch;
      const Index entry = u.gradient ? scheduler->append_gradients(u.unit, u.offset, false, false)
                                     : scheduler->append_parameters(u.unit, u.offset, form, false);
      if (entry == kNone) return;
      expected.push_back(entry);
      ++ahead;
    }
  }
  // The device comes to the oldest opening: its work, then its end.
  void carry_out() {
    const Opened opened = behind.front();
    behind.pop_front();
    until_ready(opened.entry);
    if (opened.gradient) {
      scheduler->commit_gradients(opened.entry, {contributes.get(), chunk_count}, true, false);
      scheduler->release(differentiated);
    } else if (opened.backward) {
      differentiated = opened.entry;
    } else {
      scheduler->release(opened.entry);
    }
  }
  void step() {
    Index parameters = kNone;
    for (std::size_t i = 0; i < pass.size(); ++i) {
      look_ahead();
      const Index entry = expected.front();
      expected.pop_front();
      ++at;
      const Index held =
          scheduler->overlapping(pass[i].offset, scheduler->opening_bytes(pass[i].unit, pass[i].gradient), entry, true);
      BALLAST_CHECK(held == kNone);
      scheduler->lease(entry);
      const bool with_gradient = i + 1 < pass.size() && pass[i + 1].gradient;
      if (pass[i].gradient) {
        scheduler->note_commit_requested(entry);
        scheduler->note_release_requested(parameters);
      } else if (with_gradient) {
        parameters = entry;
      } else {
        scheduler->note_release_requested(entry);
      }
      behind.push_back({entry, pass[i].gradient, with_gradient});
      while (behind.size() > lag) carry_out();
    }
    while (!behind.empty()) carry_out();
    std::array<Action, 16> actions;
    while (scheduler->gradients_outstanding()) run(actions);
    scheduler->decide(true);
  }

  struct Opened {
    Index entry;
    bool gradient, backward;
  };
  std::size_t lag;
  std::deque<Opened> behind;
  Index differentiated = kNone;  // parameters that the device computes gradients from
  std::vector<Use> pass;
  std::unique_ptr<Scheduler> scheduler;
  std::unique_ptr<bool[]> contributes;
  Index chunk_count = 0;
  std::deque<Index> expected;
  std::size_t at = 0, ahead = 0;
  std::uint64_t tasks = 0;
};

void decide(benchmark::State& state, const Shape& shape) {
  Trainer trainer(shape);
  trainer.step();
  trainer.tasks = 0;
  for (auto _ : state) trainer.step();
  state.SetItemsProcessed(static_cast<std::int64_t>(trainer.tasks));
  state.counters["time_per_task"] =
      benchmark::Counter(static_cast<double>(trainer.tasks), benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}
BENCHMARK_CAPTURE(decide, units_24, Shape{24, 13})->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(decide, units_100, Shape{100, 4})->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(decide, units_1000, Shape{1000, 4})->Unit(benchmark::kMillisecond);
// Ten thousand: in the smallest window; with the device far behind the trainer; with room for all; in host memory.
BENCHMARK_CAPTURE(decide, units_10000, Shape{10000, 1})->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(decide, units_10000_lag, Shape{10000, 1, Tier::nvme, 8, 4000})->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(decide, units_10000_wide, Shape{10000, 1, Tier::nvme, 20000, 4000})->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(decide, units_10000_host, Shape{10000, 1, Tier::host, 200, 4000})->Unit(benchmark::kMillisecond);

void device_map(benchmark::State& state) {
  const auto units = static_cast<Index>(state.range(0));
  std::vector<Opening> openings;
  std::uint32_t now = 0;
  for (Index u = 0; u < units; ++u, now += 2) openings.push_back({u, false, 256 * (1 + u % 7), now, now + 1});
  for (Index u = units; u-- > 0; now += 4) {
    openings.push_back({u, false, 256 * (1 + u % 7), now, now + 3});
    openings.push_back({u, true, 512 * (1 + u % 7), now + 1, now + 2});
  }
  const std::uint64_t slab = static_cast<std::uint64_t>(state.range(1)) * 256;
  bool fits = true;
  for (auto _ : state) fits &= compile_device_map(openings, slab).fits;
  BALLAST_CHECK(fits);
}
// In the smallest slab, in one of forty units, in one that holds everything.
BENCHMARK(device_map)->Args({10000, 21})->Args({10000, 160})->Args({10000, 80000})->Unit(benchmark::kMillisecond);

void simulated_step(benchmark::State& state) {
  simulate::Shape shape;
  shape.units = 48;
  shape.chunks_per_unit = 4;
  simulate::Plan plan = simulate::make_plan(shape, simulate::Timing::just_in_time);
  plan.limits.fetch_slots = 8;
  plan.limits.update_slots = 16;
  plan.limits.gradient_slots = 4;
  plan.limits.entries = 300;
  plan.limits.jobs = 4096;
  simulate::expect_default_pass(plan, 1);
  plan.slab_bytes *= 2;
  simulate::ProgramWriter writer(plan);
  for (int s = 0; s < 2; ++s) writer.step(1, true);
  writer.settle();
  for (auto _ : state) {
    const simulate::Simulation run = simulate::simulate(plan, {}, 1, false);
    BALLAST_CHECK(run.failure.empty());
  }
}
BENCHMARK(simulated_step)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace ballast::schedule
