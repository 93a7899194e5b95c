// Before the first step: units, commit, initial values; and reading values back.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/base/size.h>
#include <ballast/engine/deepspeed.h>
#include <ballast/kernels/convert.h>
#include <ballast/offload/device_registry.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "chunk_values.h"
#include "engine_implementation.h"
#include "extent_buffer.h"
#include "plan_schedule.h"

namespace ballast {

using engine::ChunkLayout;
using engine::ChunkPlacement;
using engine::ExtentBuffer;
using engine::ParameterLayout;
using engine::Segment;
using engine::to_states;
using engine::to_values;
using engine::UnitLayout;

namespace {

std::uint64_t most_chunk_bytes(const engine::Layout& layout) {
  std::uint64_t most = 0;
  for (const ChunkLayout& chunk : layout.chunks) most = std::max(most, chunk.parameter_bytes + chunk.optimizer_bytes());
  return most;
}

}  // namespace

EngineImplementation::EngineImplementation(const Config& config, EngineEnvironment environment)
    : config_(config), environment_(std::move(environment)), loss_scaler_(config.loss_scale) {
  config_.validate();
  (void)config_.learning_rate(0);  // may lack what it needs
  hooks_ = static_cast<engine::TestHooks*>(environment_.test_hooks.get());
  if (environment_.device) {
    device_ = std::static_pointer_cast<offload::Device>(environment_.device);
  } else if (const std::string kind = config_.device == "auto" ? offload::automatic_device() : config_.device;
             kind != "host") {
    const bool threads = environment_.communicator && environment_.communicator->name() == "in-process";
    device_ = offload::device_backend(kind).make(threads ? environment_.communicator->rank() : -1);
  } else {
    offload::HostDeviceOptions options;
    options.capacity_bytes = config_.budget.device_bytes;
    options.check_interrupt = environment_.check_interrupt;
    if (hooks_ != nullptr) options.before_copy = hooks_->before_copy;
    device_ = offload::make_host_device(options);
  }
  owner_process_ = ::getpid();
  exceptions_before_ = std::uncaught_exceptions();
  const std::string& backend = config_.communication.backend;
  const bool first = !environment_.communicator || environment_.communicator->rank() == 0;
  if (config_.deepspeed && first && environment_.log)
    if (const std::string text = config_.deepspeed->without_meaning(); !text.empty())
      environment_.log(LogLevel::warning, text);
  if (!environment_.communicator && backend != "auto" && backend != "single") {
    throw ConfigError("communication.backend is \"" + backend +
                      "\": hand its communicator in with EngineEnvironment (make_mpi_communicator, for \"mpi\")");
  }
  communicator_ = environment_.communicator ? environment_.communicator : make_single_communicator();
  streams_.push_back(device_->make_stream("compute"));
}

bool EngineImplementation::forked() const { return ::getpid() != owner_process_; }

EngineImplementation::~EngineImplementation() {
  // A forked child has none of the threads, and perhaps locked mutexes: what they work on is left where it is.
  if (forked()) {
    static_cast<void>(save_.release());
    static_cast<void>(committer_.release());
    static_cast<void>(executor_.release());
  }
  end_save();
  if (executor_ && several_ranks()) {
    // Collectives that the other ranks have begun or will begin are joined; the communicator ends this wait at last.
    try {
      Lock lock(executor_->mutex());
      drop_expected();
      executor_->wait(lock, [&] { return executor_->scheduler().collectives_over(); });
    } catch (...) {
      // The failure has been reported where it was first seen, or the engine goes down with it.
    }
  }
  committer_.reset();  // what is complete is committed
  if (executor_) executor_->begin_closing();
  streams_.clear();  // drains the trainer's work while all memory is still there
  executor_.reset();
}

void EngineImplementation::require_committed() const {
  if (!committed_) throw UsageError("Engine::commit has not been called yet");
}

void EngineImplementation::require_initialized() const {
  require_committed();
  if (!initialized_) throw UsageError("the parameters have no values yet; call Engine::initialize first");
}

UnitId EngineImplementation::add_unit(std::string name, std::vector<ParameterSpec> parameters, UnitOptions options) {
  if (committed_) throw UsageError("unit " + name + " comes too late: Engine::commit has been called");
  if (unit_names_.count(name) > 0) throw UsageError("there is a unit named " + name + " already");
  std::map<std::string, std::uint32_t, std::less<>> names;
  bool trainable = false;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    engine::element_count(parameters[i].shape, name + "/" + parameters[i].name);
    trainable |= parameters[i].options.trainable;
    if (!names.emplace(parameters[i].name, static_cast<std::uint32_t>(i)).second) {
      throw UsageError("unit " + name + " has two parameters named " + parameters[i].name +
                       "; a tied parameter is registered once and used twice");
    }
  }
  const std::uint32_t communicator = communicator_number(name, options);
  UnitState& state = units_.emplace_back();
  state.trainable = trainable;
  state.names = std::move(names);
  state.step_counts.assign(parameters.size(), 0);
  state.present.assign(parameters.size(), 0);
  state.requested.assign(parameters.size(), 0);
  unit_names_.insert(name);
  specs_.push_back({std::move(name), std::move(parameters), communicator, {}});
  divisors_.push_back(options.gradient_divisor);
  return {static_cast<std::uint32_t>(specs_.size() - 1)};
}

ParameterId EngineImplementation::parameter(UnitId unit, std::string_view name) const {
  if (unit.index >= specs_.size()) throw UsageError("there is no unit " + std::to_string(unit.index));
  const engine::UnitSpec& spec = specs_[unit.index];
  const auto& names = units_[unit.index].names;
  if (const auto found = names.find(name); found != names.end()) return {unit.index, found->second};
  throw UsageError("unit " + spec.name + " has no parameter named " + std::string(name));
}

void EngineImplementation::expect_order(std::vector<ExpectedAccess> accesses, int micro_batches) {
  if (committed_) throw UsageError("Engine::expect_order comes too late: Engine::commit has been called");
  for (const ExpectedAccess& access : accesses) {
    if (access.unit.index >= specs_.size()) throw UsageError("there is no unit " + std::to_string(access.unit.index));
  }
  if (micro_batches < 1) throw UsageError("micro_batches is " + std::to_string(micro_batches) + "; at least 1");
  expected_order_ = std::move(accesses);
  expected_micro_batches_ = micro_batches;
}

void EngineImplementation::commit(const CommitOptions& options) {
  if (committed_) throw UsageError("Engine::commit has been called already");
  if (specs_.empty()) throw UsageError("Engine::commit without any unit");
  agree_on_start();
  meet_unit_communicators();
  engine::PlanInputs inputs;
  inputs.micro_batches = expected_micro_batches_;
  inputs.world_size = communicator_->world_size();
  inputs.rank = communicator_->rank();
  inputs.device_updates_int8 = device_->host_addressable();
  std::vector<bool> trainable;
  for (const UnitState& unit : units_) trainable.push_back(unit.trainable);
  if (expected_order_.empty()) {
    inputs.openings = engine::default_openings(trainable);
  } else {
    inputs.openings = engine::expected_openings(expected_order_, trainable);
  }
  const auto& placement = config_.placement;
  const bool may_use_nvme = config_.durability.every_steps > 0 || placement.automatic ||
                            placement.parameters == Tier::nvme || placement.optimizer == Tier::nvme ||
                            placement.gradients == Tier::nvme;
  if (may_use_nvme) {
    // A budget that cannot work is refused before any directory is touched.
    engine::make_plan(specs_, config_, inputs);
    try {
      inputs.alignment_bytes = std::max<std::uint64_t>(4096, io::ChunkStore::probe_alignment_bytes(config_.nvme.paths));
    } catch (const IoError&) {
      if (!placement.automatic || config_.durability.every_steps > 0)
        throw;  // automatic placement may do without; where it cannot, opening says why
    }
    if (communicator_->world_size() > 1) {
      // What differs must not make the ranks' plans differ; and no probe is left that removes a directory it has made.
      std::vector<std::uint64_t> all(static_cast<std::size_t>(communicator_->world_size()));
      communicator_->all_gather(std::as_bytes(std::span(&inputs.alignment_bytes, 1)),
                                std::as_writable_bytes(std::span(all)));
      inputs.alignment_bytes = *std::max_element(all.begin(), all.end());
    }
  }
  plan_ = engine::make_plan(specs_, config_, inputs);
  if (placement.automatic && plan_.nvme_gradients && environment_.log) {
    const auto bytes = std::to_string(element_bytes(config_.precision.gradients));
    environment_.log(LogLevel::info, "gradients are kept on NVMe, as budget.host is too small for them: " + bytes +
                                         " bytes more written and read for each of them, every micro-batch");
  }
  check_machine_memory();
  divide_machine();
  shard_communicator_ = plan_.partition.world_size == plan_.world_size
                            ? communicator_
                            : communicator_->split(static_cast<int>(plan_.rank / plan_.partition.world_size));

  const schedule::Limits limits = engine::schedule_limits(plan_, config_, inputs.openings);
  // What is appended ahead is counted, so that it is the same on all ranks.
  if (several_ranks()) most_expected_ = inputs.openings.size();

  engine::Executor::Communicators communicators = {communicator_.get()};
  for (const UnitCommunicator& each : unit_communicators_) communicators.push_back(each.communicator.get());
  std::optional<StoredRun> stored = find_stored_run(options);
  executor_ = std::make_unique<engine::Executor>(plan_, config_, *device_, communicators, share_, limits, environment_,
                                                 hooks_, stored ? &stored->state : nullptr);
  sort_norm_parts();
  for (std::size_t u = 0; u < units_.size(); ++u) {
    units_[u].contributes = std::make_unique<bool[]>(plan_.layout.units[u].chunk_count);
  }
  chunk_contributed_.assign(plan_.layout.chunks.size(), 0);
  engine::Trace& trace = traces_[{Pass::train, 0}];
  trace.openings = inputs.openings;
  const bool fits = engine::compile_trace(plan_, element_bytes(config_.precision.gradients), trace);
  BALLAST_CHECK(fits);
  next_trace_ = &trace;
  recorder_.begin();
  committed_ = true;
  begin_durable(std::move(stored));
}

const UnitLayout& EngineImplementation::unit_layout(UnitId unit) const {
  if (unit.index >= plan_.layout.units.size()) throw UsageError("there is no unit " + std::to_string(unit.index));
  return plan_.layout.units[unit.index];
}

const ParameterLayout& EngineImplementation::parameter_layout(ParameterId id) const {
  const UnitLayout& unit = unit_layout({id.unit});
  if (id.index >= unit.parameters.size()) {
    throw UsageError("unit " + unit.name + " has no parameter " + std::to_string(id.index));
  }
  return unit.parameters[id.index];
}

void EngineImplementation::initialize(const Engine::Fill& fill) {
  require_committed();
  if (initialized_) throw UsageError("Engine::initialize has been called already");
  if (!fill) throw UsageError("Engine::initialize with an empty function");
  const engine::Layout& layout = plan_.layout;
  ExtentBuffer extent(most_chunk_bytes(layout));
  std::vector<float> values;
  for (std::uint32_t c = 0; c < layout.chunks.size(); ++c) {
    const ChunkLayout& chunk = layout.chunks[c];
    // They wait where the moments will be, where those have room for them.
    std::byte* const moments = extent.data() + chunk.parameter_bytes + chunk.master_bytes;
    const bool room = 2 * chunk.moment_bytes >= chunk.elements * sizeof(float);
    if (!room) values.resize(chunk.elements);
    const std::span<float> all(room ? reinterpret_cast<float*>(moments) : values.data(), chunk.elements);
    std::fill(all.begin(), all.end(), 0.0f);
    for (std::uint32_t s = chunk.first_segment; s < chunk.first_segment + chunk.segment_count; ++s) {
      const Segment& segment = layout.segments[s];
      fill({chunk.unit, segment.parameter}, static_cast<std::int64_t>(segment.parameter_first),
           all.subspan(segment.begin, segment.count));
    }
    to_states(chunk, all.data(), extent.data());
    std::memset(moments, 0, 2 * chunk.moment_bytes);
    executor_->save_chunk(c, extent.data());
  }
  initialized_ = true;
  if (plan_.durable) {
    // The first committed step is the one before any: a run that ends early goes on from here.
    Lock lock(executor_->mutex());
    request_commit({});
    finish_commit(lock);
  }
}

// Calls visit(chunk, segment, first, count, done) for the parts of a parameter's range: `count` elements from `first`
// within the segment, the done-th of the range onward.
template <class Visit>
void EngineImplementation::visit_elements(ParameterId id, std::int64_t first_element, std::size_t count,
                                          const Visit& visit) {
  require_initialized();
  const ParameterLayout& parameter = parameter_layout(id);
  const auto begin = static_cast<std::uint64_t>(first_element);
  if (first_element < 0 || begin > parameter.elements || count > parameter.elements - begin) {
    throw UsageError("elements " + std::to_string(first_element) + " to " + std::to_string(begin + count) +
                     " of parameter " + parameter.name + ", which has " + std::to_string(parameter.elements));
  }
  {
    Lock lock(executor_->mutex());
    executor_->check(lock);
    // A commit that is still on its way to its stream's end may bring an update (eager).
    executor_->wait(lock, [&] { return commits_pending_ == 0; });
    if (executor_->scheduler().unit_update_due(id.unit)) force_updates(lock, id.unit);
    drop_expected();
    executor_->wait(lock, [&] { return !executor_->scheduler().unit_busy(id.unit); });
  }
  const engine::Layout& layout = plan_.layout;
  const UnitLayout& unit = layout.units[id.unit];
  for (std::uint32_t c = unit.first_chunk; c < unit.first_chunk + unit.chunk_count; ++c) {
    const ChunkLayout& chunk = layout.chunks[c];
    for (std::uint32_t s = chunk.first_segment; s < chunk.first_segment + chunk.segment_count; ++s) {
      const Segment& segment = layout.segments[s];
      if (segment.parameter != id.index) continue;
      const std::uint64_t from = std::max(begin, segment.parameter_first);
      const std::uint64_t to = std::min(begin + count, segment.parameter_first + segment.count);
      if (from < to) visit(c, segment.begin + (from - segment.parameter_first), to - from, from - begin);
    }
  }
  Lock lock(executor_->mutex());
  top_up(lock);
  executor_->wake();
}

void EngineImplementation::read(ParameterId id, std::int64_t first_element, std::span<float> values) {
  require_committed();
  ExtentBuffer extent(most_chunk_bytes(plan_.layout));
  std::vector<float> whole;
  visit_elements(id, first_element, values.size(),
                 [&](std::uint32_t c, std::uint64_t first, std::uint64_t count, std::uint64_t done) {
                   const ChunkLayout& chunk = plan_.layout.chunks[c];
                   executor_->load_chunk(c, extent.data());
                   whole.resize(chunk.elements);
                   to_values(chunk, extent.data(), whole.data());
                   std::copy_n(whole.begin() + static_cast<std::ptrdiff_t>(first), count,
                               values.begin() + static_cast<std::ptrdiff_t>(done));
                 });
  gather_elements(id, first_element, values);
}

void EngineImplementation::read_moments(ParameterId id, std::int64_t first_element, std::span<float> exp_avg,
                                        std::span<float> exp_avg_sq) {
  require_committed();
  if (exp_avg.size() != exp_avg_sq.size()) throw UsageError("read_moments wants two spans of one length");
  if (!parameter_layout(id).trainable)
    throw UsageError("parameter " + parameter_layout(id).name + " is frozen and has no moments");
  ExtentBuffer extent(most_chunk_bytes(plan_.layout));
  visit_elements(id, first_element, exp_avg.size(),
                 [&](std::uint32_t c, std::uint64_t first, std::uint64_t count, std::uint64_t done) {
                   const ChunkLayout& chunk = plan_.layout.chunks[c];
                   executor_->load_chunk(c, extent.data());
                   const std::byte* moments = extent.data() + chunk.parameter_bytes + chunk.master_bytes;
                   for (const kernels::Moment which : {kernels::Moment::exp_avg, kernels::Moment::exp_avg_sq}) {
                     const std::span<float> out = which == kernels::Moment::exp_avg ? exp_avg : exp_avg_sq;
                     engine::moment_values(config_.precision.moments, which, moments, first, out.subspan(done, count));
                     moments += chunk.moment_bytes;
                   }
                 });
  gather_elements(id, first_element, exp_avg);
  gather_elements(id, first_element, exp_avg_sq);
}

std::uint64_t EngineImplementation::step_count(ParameterId id) const {
  require_committed();
  parameter_layout(id);
  Lock lock(executor_->mutex());
  executor_->wait(lock, [&] { return commits_pending_ == 0; });
  return units_[id.unit].step_counts[id.index];
}

Stream EngineImplementation::stream() const {
  Stream stream;
  stream.stream_ = streams_.front().get();
  return stream;
}

Stream EngineImplementation::make_stream(std::string_view name) {
  streams_.push_back(device_->make_stream(name));
  Stream stream;
  stream.stream_ = streams_.back().get();
  return stream;
}

Stream EngineImplementation::adopt_stream(void* native_handle, std::string_view name) {
  streams_.push_back(device_->adopt_stream(native_handle, name));
  Stream stream;
  stream.stream_ = streams_.back().get();
  return stream;
}

Report EngineImplementation::report() {
  require_committed();
  const Lock lock(executor_->mutex());
  Report r;
  r.parameters = static_cast<std::int64_t>(plan_.layout.parameters);
  r.world_size = communicator_->world_size();
  r.rank = communicator_->rank();
  r.device = std::string(device_->name());
  r.timing = std::string(to_string(plan_.timing));
  r.placement = plan_.placement_name;
  r.io_backend = executor_->backend_name();
  r.io_backend_reason = executor_->backend_reason();
  r.threads = executor_->threads();
  r.ranks_on_machine = share_.ranks;
  r.zero_stage = config_.zero_stage;
  r.resident_fraction = plan_.resident_fraction;
  r.nvme_stored_bytes = executor_->stored_bytes();
  r.nvme_files = executor_->stored_files();
  r.at_rest =
      executor_->at_rest(lock) && !(committer_ && committer_->busy()) && !(save_ != nullptr && save_->running());
  r.checkpoint_bytes = executor_->copied_bytes(lock);
  r.checkpoint_chunks_from_updates = executor_->chunks_copied_from_updates(lock);
  r.checkpoint_chunks_asked_for = executor_->chunks_copied_first(lock);
  for (int lane = 0; lane < kLaneCount; ++lane) {
    r.lanes[static_cast<std::size_t>(lane)] = executor_->lane_report(static_cast<Lane>(lane), lock);
  }
  LaneReport& compute = r.lanes[static_cast<std::size_t>(Lane::compute)];
  for (const auto& stream : streams_) {
    compute.busy_ns += stream->closure_ns();
    compute.tasks += stream->closures();
  }
  r.steps_updated = steps_updated_;
  r.steps_discarded = steps_discarded_;
  r.acquires = acquires_;
  r.acquires_prefetched = prefetched_;
  r.trace_repairs = repairs_;
  r.acquire_wait_ns = executor_->waited_ns();
  r.budget_device_bytes = config_.budget.device_bytes;
  r.budget_host_bytes = config_.budget.host_bytes;
  r.peak_device_bytes = plan_.device_bytes;
  r.peak_host_bytes = plan_.host_bytes;
  const auto add = [](std::vector<MemoryRange>& ranges, const char* name, std::uint64_t bytes) {
    if (bytes > 0) ranges.push_back({name, bytes});
  };
  add(r.device_memory, "parameters", plan_.device_parameter_bytes);
  add(r.device_memory, "optimizer states", plan_.device_optimizer_bytes);
  add(r.device_memory, "gradients", plan_.device_gradient_bytes);
  add(r.device_memory, "window of open units", plan_.device_window_bytes);
  add(r.host_memory, "gradients", plan_.host_gradient_bytes);
  add(r.host_memory, "resident parameters", plan_.host_parameter_bytes);
  add(r.host_memory, "resident optimizer states", plan_.host_optimizer_bytes);
  add(r.host_memory, "staging for committed steps", plan_.staging_bytes);
  add(r.host_memory, "fetch slots", plan_.fetch_slots * plan_.fetch_slot_bytes);
  add(r.host_memory, "update slots", plan_.update_slots * plan_.update_slot_bytes);
  add(r.host_memory, "gradient slots", plan_.gradient_slots * plan_.gradient_slot_bytes);
  add(r.host_memory, "copies for checkpoints", plan_.copy_slots * plan_.copy_slot_bytes);
  return r;
}

Timeline EngineImplementation::timeline() {
  require_committed();
  Timeline timeline;
  for (const UnitLayout& unit : plan_.layout.units) timeline.unit_names.push_back(unit.name);
  {
    const Lock lock(executor_->mutex());
    timeline.complete_from_ns = executor_->spans().complete_from_ns();
    executor_->spans().visit([&](const Span& span) { timeline.spans.push_back(span); });
  }
  for (const auto& stream : streams_) {
    const offload::ClosureSpans closures = stream->closure_spans();
    timeline.complete_from_ns = std::max(timeline.complete_from_ns, closures.complete_from_ns);
    for (const auto& each : closures.spans)
      timeline.spans.push_back({Lane::compute, "compute", kNoUnit, 0, each.begin_ns, each.end_ns, 0});
  }
  return timeline;
}

void EngineImplementation::write_trace(const std::string& path) { engine::write_trace_file(path, timeline()); }

}  // namespace ballast
