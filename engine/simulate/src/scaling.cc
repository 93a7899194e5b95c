// One rank of many on the virtual clock.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/simulate/rank_trainer.h>
#include <ballast/simulate/scaling.h>

#include <algorithm>

namespace ballast::simulate {

using schedule::Action;
using schedule::JobKind;
using schedule::Task;
using schedule::Tier;

namespace {

constexpr std::uint64_t kNsPerSecond = 1'000'000'000;
constexpr std::uint64_t kParameterBytes = 2, kGradientBytes = 4, kOptimizerBytes = 10;  // of the cases below

// Nanoseconds for so many bytes, without overflow.
std::uint64_t work_ns(std::uint64_t bytes, std::uint64_t bytes_per_second) {
  return static_cast<std::uint64_t>(static_cast<unsigned __int128>(bytes) * kNsPerSecond / bytes_per_second);
}

class RankClock {
 public:
  RankClock(const Plan& plan, const HardwareModel& hardware, const CollectiveModel& collectives)
      : plan_(plan), hardware_(hardware), collectives_(collectives), exchange_(plan.ranks, true) {}

  RankSimulation run() {
    RankTrainer rank(plan_, 0, {});
    rank.check_always(false);
    rank.begin(exchange_);
    while (rank.error().empty() && !rank.done()) {
      schedule_new(rank);
      if (!step(rank)) break;
      for (; decisions_ < rank.decisions(); ++decisions_) {
        count_.time_ns = now_ - step_began_;
        result_.steps.push_back(count_);
        count_ = StepCount{};
        step_began_ = now_;
      }
    }
    if (rank.error().empty() && rank.done()) rank.finish();
    if (!rank.error().empty() || !rank.done()) {
      result_.failure = (rank.error().empty() ? "stall" : rank.error()) + "\n" + rank.describe();
    }
    count_.time_ns = now_ - step_began_;
    result_.rest = count_;
    result_.time_ns = now_;
    result_.tasks = rank.tasks_started();
    result_.bound_ns = *std::max_element(busy_, busy_ + kResources);
    if (hardware_.one_drive) result_.bound_ns = std::max(result_.bound_ns, busy_[kRead] + busy_[kWrite]);
    return std::move(result_);
  }

 private:
  enum Resources : std::size_t { kRead, kWrite, kCopyIn, kCopyOut, kCpu, kCompute, kLink, kResources };
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};

  // The earliest event happens; ties go to what began first. False: there is none.
  bool step(RankTrainer& rank) {
    std::size_t next = times_.size();
    std::uint64_t time = kNever;
    for (std::size_t i = 0; i < times_.size(); ++i) {
      if (times_[i] < time) time = times_[next = i];
    }
    RankTrainer::Event event{RankTrainer::EventKind::task, next};
    if (compute_time_ < time) {
      time = compute_time_;
      event = {RankTrainer::EventKind::compute, 0};
    }
    if (agreement_time_ < time) {
      time = agreement_time_;
      event = {RankTrainer::EventKind::agreement, 0};
    }
    if (time == kNever) return false;
    now_ = time;
    if (event.kind == RankTrainer::EventKind::task) {
      count(rank.task(next));
      times_.erase(times_.begin() + static_cast<std::ptrdiff_t>(next));
    } else {
      (event.kind == RankTrainer::EventKind::compute ? compute_time_ : agreement_time_) = kNever;
    }
    return rank.happen(event, exchange_);
  }

  std::uint64_t serve(Resources resource, std::uint64_t work_ns, std::uint64_t latency_ns) {
    const std::size_t shared = hardware_.one_drive && resource == kWrite ? kRead : resource;
    free_at_[shared] = std::max(free_at_[shared], now_) + work_ns;
    busy_[resource] += work_ns;
    return free_at_[shared] + latency_ns;
  }
  std::uint64_t serve(Resources resource, const LaneModel& lane, std::uint64_t bytes) {
    return serve(resource, work_ns(bytes, lane.bytes_per_second), lane.latency_ns);
  }

  std::uint64_t drive_bytes(const Action& action) const {
    const schedule::Chunk& chunk = plan_.chunks[action.chunk];
    if (action.task == Task::read_gradient || action.job_kind == JobKind::gradient) return chunk.gradient_bytes;
    const std::uint64_t parameters = chunk.parameters == Tier::nvme ? chunk.parameter_bytes : 0;
    const std::uint64_t states = chunk.optimizer == Tier::nvme ? chunk.optimizer_bytes : 0;
    return parameters + (action.task == Task::write || action.job_kind == JobKind::update ? states : 0);
  }

  // What a rank receives in a collective.
  std::uint64_t collective_elements(const Action& action) const {
    const schedule::Unit& unit = plan_.units[action.unit];
    std::uint64_t elements = 0;
    for (Index i = 0; i < unit.chunk_count; ++i) {
      elements += plan_.chunks[unit.first_chunk + i].parameter_bytes / kParameterBytes;
    }
    const std::uint64_t others = collectives_.world_size - 1;
    // Whole gradients (stage 0): a reduce-scatter and an all-gather of 1/N each.
    return unit.gathered ? others * elements : 2 * others * (elements / collectives_.world_size);
  }

  std::uint64_t collective_bytes(const Action& action) const {
    const schedule::Unit& unit = plan_.units[action.unit];
    std::uint64_t bytes = 0;
    for (Index i = 0; i < unit.chunk_count; ++i) {
      const schedule::Chunk& chunk = plan_.chunks[unit.first_chunk + i];
      bytes += action.task == Task::gather ? chunk.parameter_bytes : chunk.gradient_bytes;
    }
    const std::uint64_t others = collectives_.world_size - 1;
    return unit.gathered ? others * bytes : 2 * others * (bytes / collectives_.world_size);
  }

  // Of memory: an update reads and writes its states and reads its gradient, a sum reads two and writes one.
  std::uint64_t cpu_bytes(const Action& action) const {
    const schedule::Chunk& chunk = plan_.chunks[action.chunk];
    if (action.task == Task::update) return 2 * (chunk.parameter_bytes + chunk.optimizer_bytes) + chunk.gradient_bytes;
    return action.first ? chunk.gradient_bytes : 3 * chunk.gradient_bytes;
  }

  void count(const Action& action) {
    switch (action.task) {
      case Task::read:
      case Task::read_gradient:
        count_.drive_read_bytes += drive_bytes(action);
        [[fallthrough]];
      case Task::write:
        count_.drive_bytes += drive_bytes(action);
        break;
      case Task::copy_in:
        count_.copied_in_bytes += plan_.chunks[action.chunk].parameter_bytes;
        break;
      case Task::copy_out:
        count_.copied_out_bytes += plan_.chunks[action.chunk].gradient_bytes;
        break;
      case Task::update:
      case Task::accumulate:
        count_.cpu_bytes += cpu_bytes(action);
        break;
      case Task::gather:
      case Task::reduce:
        break;
    }
    if (action.chunk != kNone) return;
    (action.task == Task::gather ? count_.gathered_elements : count_.reduced_elements) += collective_elements(action);
    count_.link_bytes += collective_bytes(action);
  }

  std::uint64_t finish_time(const Action& action) {
    if (action.chunk == kNone) {
      const bool twice = !plan_.units[action.unit].gathered;
      const std::uint64_t steps = (twice ? 2u : 1u) * std::uint64_t{collectives_.world_size - 1};
      return serve(
          kLink,
          steps * collectives_.link.latency_ns + work_ns(collective_bytes(action), collectives_.link.bytes_per_second),
          0);
    }
    const schedule::Chunk& chunk = plan_.chunks[action.chunk];
    switch (action.task) {
      case Task::read:
      case Task::read_gradient:
        return serve(kRead, hardware_.read, drive_bytes(action));
      case Task::write:
        return serve(kWrite, hardware_.write, drive_bytes(action));
      case Task::copy_in:
        return serve(kCopyIn, hardware_.copy_in, chunk.parameter_bytes);
      case Task::copy_out:
        return serve(kCopyOut, hardware_.copy_out, chunk.gradient_bytes);
      default:
        return serve(kCpu, hardware_.cpu, cpu_bytes(action));
    }
  }

  void schedule_new(const RankTrainer& rank) {
    while (times_.size() < rank.tasks_in_flight()) times_.push_back(finish_time(rank.task(times_.size())));
    if (rank.computing() && compute_time_ == kNever && plan_.timed) {
      compute_time_ = serve(kCompute, rank.computing_operation().work_ns, 0);
    } else if (rank.computing() && compute_time_ == kNever) {
      // A rank's maths pass over whole units, whatever it stores of them.
      const schedule::Unit& unit = plan_.units[rank.computing_unit()];
      std::uint64_t bytes = 0;
      for (Index i = 0; i < unit.chunk_count; ++i) bytes += plan_.chunks[unit.first_chunk + i].parameter_bytes;
      if (unit.gathered) bytes *= collectives_.world_size;
      compute_time_ = serve(kCompute, work_ns(bytes, hardware_.compute_bytes_per_second), 0);
    }
    if (rank.agreeing() && agreement_time_ == kNever) {
      std::uint64_t steps = 0;
      while ((Index{1} << steps) < collectives_.world_size) ++steps;
      agreement_time_ = now_ + 2 * steps * collectives_.link.latency_ns;
    }
  }

  const Plan& plan_;
  const HardwareModel& hardware_;
  const CollectiveModel& collectives_;
  Exchange exchange_;
  RankSimulation result_;
  StepCount count_;
  std::size_t decisions_ = 0;
  std::uint64_t now_ = 0, step_began_ = 0;
  std::uint64_t free_at_[kResources] = {}, busy_[kResources] = {};
  std::vector<std::uint64_t> times_;  // of the tasks in flight, in the model's order
  std::uint64_t compute_time_ = kNever, agreement_time_ = kNever;
};

}  // namespace

Plan scaling_plan(const ScalingCase& scaling, Index world_size) {
  BALLAST_CHECK(world_size >= 1 && scaling.unit_elements % world_size == 0);
  Shape shape;
  shape.units = scaling.units;
  shape.ranks = world_size > 1 ? 2 : 1;
  shape.whole = scaling.zero_stage == 0;
  shape.parameters = scaling.zero_stage < 3 ? Tier::device : Tier::nvme;
  shape.optimizer = scaling.optimizer;
  Plan plan = make_plan(shape, scaling.timing);
  const std::uint64_t elements = scaling.unit_elements / (shape.whole ? 1 : world_size);
  for (schedule::Chunk& chunk : plan.chunks) {
    chunk.parameter_bytes = kParameterBytes * elements;
    chunk.optimizer_bytes = kOptimizerBytes * elements;
    chunk.gradient_bytes = kGradientBytes * elements;
  }
  schedule::Limits& limits = plan.limits;
  limits.fetch_slots = limits.update_slots = limits.gradient_slots = 8;
  limits.entries = 16 * scaling.units + 64;
  limits.jobs = 32 * scaling.units + 64;
  plan.run_ahead = 1000;
  expect_default_pass(plan, scaling.micro_batches);
  plan.slab_bytes += scaling.spare_units * shards_of(plan, 0);
  ProgramWriter writer(plan);
  for (Index s = 0; s < scaling.steps; ++s) writer.step(scaling.micro_batches, true);
  writer.settle();
  plan.text = "stage " + std::to_string(scaling.zero_stage) + ", " + std::to_string(world_size) + " ranks";
  return plan;
}

RankSimulation simulate_rank(const Plan& plan, const HardwareModel& hardware, const CollectiveModel& collectives) {
  return RankClock(plan, hardware, collectives).run();
}

}  // namespace ballast::simulate
