// The virtual clock.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/base/random.h>
#include <ballast/simulate/simulator.h>

#include <algorithm>

namespace ballast::simulate {

using schedule::Action;
using schedule::JobKind;
using schedule::Task;
using schedule::Tier;

namespace {

constexpr std::uint64_t kNsPerSecond = 1'000'000'000;

class Clock {
 public:
  Clock(const Plan& plan, const HardwareModel& hardware, std::uint64_t seed)
      : plan_(plan), hardware_(hardware), random_(seed) {}

  Simulation run(bool check_always) {
    ModelTrainer model(plan_);
    model.check_always(check_always);
    std::size_t decisions = 0;
    std::uint64_t step_began = 0;
    schedule_new(model);
    while (!model.done()) {
      if (!model.error().empty() || model.stalled()) break;
      // The earliest; ties go to what began first.
      std::size_t next = 0;
      for (std::size_t i = 1; i < times_.size(); ++i) {
        if (times_[i] < times_[next]) next = i;
      }
      const bool compute = computing_ && (times_.empty() || compute_time_ < times_[next]);
      now_ = compute ? compute_time_ : times_[next];
      note(compute ? 0xFFFF : next);
      if (compute) {
        computing_ = false;
        model.complete(model.events() - 1);
      } else {
        times_.erase(times_.begin() + static_cast<std::ptrdiff_t>(next));
        model.complete(next);
      }
      schedule_new(model);
      for (; decisions < model.decisions(); ++decisions) {
        result_.step_ns.push_back(now_ - step_began);
        step_began = now_;
      }
    }
    if (model.error().empty() && model.done()) model.finish();
    if (!model.error().empty()) {
      result_.failure = model.error() + "\n" + model.describe();
    } else if (!model.done()) {
      result_.failure = "stall\n" + model.describe();
    }
    result_.time_ns = now_;
    result_.reliefs = model.reliefs();
    result_.deviations = model.deviations();
    result_.tasks = model.tasks_started();
    auto& busy = result_.busy_ns;
    result_.bound_ns = *std::max_element(busy.begin(), busy.end());
    if (hardware_.one_drive) result_.bound_ns = std::max(result_.bound_ns, busy[0] + busy[1]);
    return std::move(result_);
  }

 private:
  void note(std::uint64_t what) { result_.trace_hash = base::mix(result_.trace_hash ^ base::mix(now_) ^ (what << 48)); }

  std::uint64_t serve(Resource resource, const LaneModel& lane, std::uint64_t bytes) {
    const auto r = static_cast<std::size_t>(resource);
    const std::uint64_t work = bytes * kNsPerSecond / lane.bytes_per_second;
    const std::size_t shared = hardware_.one_drive && resource == Resource::drive_write ? 0 : r;
    free_at_[shared] = std::max(free_at_[shared], now_) + work;
    result_.busy_ns[r] += work;
    result_.bytes[r] += bytes;
    const std::uint64_t jitter = hardware_.jitter_ns == 0 ? 0 : random_.below(hardware_.jitter_ns + 1);
    return free_at_[shared] + lane.latency_ns + jitter;
  }

  std::uint64_t finish_time(const Action& action) {
    const schedule::Chunk& chunk = plan_.chunks[action.chunk];
    const std::uint64_t parameters = chunk.parameters == Tier::nvme ? chunk.parameter_bytes : 0;
    const std::uint64_t states = chunk.optimizer == Tier::nvme ? chunk.optimizer_bytes : 0;
    const bool gradient = action.job_kind == JobKind::gradient;
    switch (action.task) {
      case Task::read_gradient:
        return serve(Resource::drive_read, hardware_.read, chunk.gradient_bytes);
      case Task::read:
        if (gradient) return serve(Resource::drive_read, hardware_.read, chunk.gradient_bytes);
        return serve(Resource::drive_read, hardware_.read,
                     parameters + (action.job_kind == JobKind::update ? states : 0));
      case Task::write:
        return serve(Resource::drive_write, hardware_.write, gradient ? chunk.gradient_bytes : parameters + states);
      case Task::copy_in:
        return serve(Resource::copy_in, hardware_.copy_in, chunk.parameter_bytes);
      case Task::copy_out:
        return serve(Resource::copy_out, hardware_.copy_out, chunk.gradient_bytes);
      case Task::update:
        return serve(Resource::cpu, hardware_.cpu, 2 * (chunk.parameter_bytes + chunk.optimizer_bytes));
      case Task::accumulate:
      case Task::gather:
      case Task::reduce:
        break;
    }
    return serve(Resource::cpu, hardware_.cpu, 2 * chunk.gradient_bytes);
  }

  // Gives every task that has just started its time.
  void schedule_new(const ModelTrainer& model) {
    Action action;
    while (model.task_of(times_.size(), action)) {
      times_.push_back(finish_time(action));
      note(static_cast<std::uint64_t>(action.task) << 8 | action.chunk);
    }
    if (!computing_ && model.events() > times_.size()) {
      computing_ = true;
      const schedule::Unit& unit = plan_.units[model.computing_unit()];
      std::uint64_t bytes = 0;
      for (Index i = 0; i < unit.chunk_count; ++i) bytes += plan_.chunks[unit.first_chunk + i].parameter_bytes;
      compute_time_ = serve(Resource::compute, {hardware_.compute_bytes_per_second, 0}, bytes);
    }
  }

  const Plan& plan_;
  const HardwareModel& hardware_;
  base::Random random_;
  Simulation result_;
  std::uint64_t now_ = 0;
  std::array<std::uint64_t, kResourceCount> free_at_{};
  std::vector<std::uint64_t> times_;  // of the tasks in flight, in the model's order
  bool computing_ = false;
  std::uint64_t compute_time_ = 0;
};

}  // namespace

Simulation simulate(const Plan& plan, const HardwareModel& hardware, std::uint64_t seed, bool check_always) {
  return Clock(plan, hardware, seed).run(check_always);
}

HardwareModel random_hardware(std::uint64_t seed) {
  base::Random random(base::mix(seed));
  HardwareModel hardware;
  for (LaneModel* lane : {&hardware.read, &hardware.write, &hardware.copy_in, &hardware.copy_out, &hardware.cpu}) {
    static constexpr std::uint64_t kRates[] = {1'000'000, 10'000'000, 100'000'000, 1'000'000'000};
    lane->bytes_per_second = kRates[random.below(4)];
    lane->latency_ns = random.below(4) == 0 ? random.below(100'000) : random.below(1'000);
  }
  hardware.one_drive = random.below(2) == 0;
  hardware.compute_bytes_per_second = 1'000'000u << random.below(10);
  hardware.jitter_ns = random.below(3) == 0 ? 0 : 1u << random.below(17);
  return hardware;
}

}  // namespace ballast::simulate
