// Engine: what a trainer links. Register units of parameters, commit, initialise, then declare steps and passes and
// acquire units around the maths. Where the states live (device, host, NVMe) never changes a number.
//
// Threads: one thread at a time, any thread. Callbacks run on the caller's thread. Errors are the types of
// ballast/base/error.h; the first background failure is latched and thrown by every later call.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/error.h>
#include <ballast/engine/config.h>
#include <ballast/engine/report.h>
#include <ballast/engine/timeline.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ballast {

class Communicator;  // <ballast/engine/communicator.h>

struct UnitId {
  std::uint32_t index = 0;
  friend bool operator==(UnitId, UnitId) = default;
};
struct ParameterId {
  std::uint32_t unit = 0;
  std::uint32_t index = 0;  // as registered within the unit
  friend bool operator==(ParameterId, ParameterId) = default;
};

struct ParameterOptions {
  int group = 0;                  // learning rate and weight decay are per group
  std::optional<DataType> dtype;  // nothing: precision.parameters
  bool trainable = true;          // false: frozen, never updated, no optimizer states
  // False: another engine counts its gradient in the global norm. A parameter that a tensor-parallel group replicates
  // is true on one rank of that group and false on the others. Alike on all ranks of this engine; it must be finite all
  // the same.
  bool in_norm = true;
};
struct ParameterSpec {
  std::string name;                 // unique within its unit; any text
  std::vector<std::int64_t> shape;  // row-major; {} is a scalar, a zero makes it empty
  ParameterOptions options = {};
};

// A unit that only some of the engine's ranks have: an expert, say, whose copies are the ranks of an
// expert-data-parallel group. Its states are partitioned over `communicator`, it is gathered and its gradients are
// averaged over that one. Every rank of the engine still makes the same calls in the same order: at the same place
// among its units each has one with a communicator of its own, of as many ranks, with parameters of the same shapes,
// types and groups. Their names may differ between communicators; the UnitId is that place. (An expert without work
// this time is acquired all the same, and its gradients are absent.)
struct UnitOptions {
  // Ranks of the engine's own communicator, any of them, in any order: a split() of it, say. Of the same kind (except
  // for one rank alone), and used for nothing else while the engine is within a call. The engine shares it. Null: all
  // ranks of the engine. communication.shard_group_size is for those units alone.
  std::shared_ptr<Communicator> communicator = {};
  // The sum of the gradients over ranks (and micro-batches) is divided by it (and their number), in the update and in
  // the norm. Nothing: the ranks of the unit's communicator. The gradients of an expert that sees the tokens of all
  // ranks are sums over all of them: the number of all ranks.
  std::optional<double> gradient_divisor = {};
};

// A view; valid as long as its lease.
struct Tensor {
  void* data = nullptr;  // on the device
  DataType dtype = DataType::bf16;
  std::span<const std::int64_t> shape;
  std::int64_t elements = 0;
};

class EngineImplementation;

// A queue of work on the device, in order. A cheap handle; the engine owns the stream.
class Stream {
 public:
  Stream() = default;
  void enqueue(std::function<void()> work);  // host device: the trainer's maths; returns at once
  void synchronize();                        // rethrows what escaped from an enqueued closure
  void* native_handle() const;               // cudaStream_t; null on the host device

 private:
  friend class EngineImplementation;
  void* stream_ = nullptr;
};

// A unit's full parameters on the device, from acquire to release. Released (on its acquire stream) by the destructor
// where the trainer did not.
class ParameterLease {
 public:
  ParameterLease() = default;
  ParameterLease(ParameterLease&& other) noexcept;
  ParameterLease& operator=(ParameterLease&& other) noexcept;
  ~ParameterLease();
  Tensor operator[](ParameterId id) const;  // UsageError for a parameter of another unit
  void wait();                              // blocks the host until the bytes are there
  void release(Stream stream);              // after the work now on that stream, the memory may be reused
  void release();                           // after the stream it was acquired on

 private:
  friend class EngineImplementation;
  EngineImplementation* engine_ = nullptr;
  std::uint64_t id_ = 0;
};

// Scratch for a unit's gradients on the device, in precision.gradients: contents undefined, to be overwritten. Takes
// effect only at commit; the destructor discards.
class GradientLease {
 public:
  GradientLease() = default;
  GradientLease(GradientLease&& other) noexcept;
  GradientLease& operator=(GradientLease&& other) noexcept;
  ~GradientLease();
  Tensor operator[](ParameterId id) const;  // UsageError for frozen parameters and those of another unit
  void absent(ParameterId id);              // no gradient this time: not the same as zero
  void commit(Stream stream);               // the unit's last contribution of this pass; one more is a UsageError
  void commit_partial(Stream stream);       // more contributions of this pass follow (a unit used twice)

 private:
  friend class EngineImplementation;
  EngineImplementation* engine_ = nullptr;
  std::uint64_t id_ = 0;
};

enum class Pass : std::uint8_t { train, evaluate };

struct PassOptions {
  Pass kind = Pass::train;
  std::uint64_t key = 0;  // selects the trace (a sequence length, say)
  int micro_batches = 1;  // that this pass covers (more than one: all micro-batches of a layer in turn)
};

// Ends the pass when destroyed. Move-only.
class PassScope {
 public:
  PassScope() = default;
  PassScope(PassScope&& other) noexcept;
  PassScope& operator=(PassScope&& other) noexcept;
  ~PassScope();
  void end();

 private:
  friend class EngineImplementation;
  EngineImplementation* engine_ = nullptr;
  std::uint64_t serial_ = 0;  // of the pass; one that its step has left behind ends nothing
};

struct GroupRate {
  int group = 0;
  double learning_rate = 0;
  std::optional<double> weight_decay;  // nothing: optimizer.weight_decay
};
struct StepOptions {
  int micro_batches = 1;                // gradients are averaged over them
  std::optional<double> learning_rate;  // nothing: optimizer.learning_rate
  std::vector<GroupRate> group_rates;   // where a group differs
};

struct GradientNorm {
  double value = 0;  // global norm of the mean gradient, unscaled; NaN or infinity where not finite
  bool finite = true;
  double clip_factor = 1;            // that update() will apply
  std::string non_finite_parameter;  // "unit/parameter" of the first, where not finite; empty: another engine's
};

// What finish_backward has found over all ranks of the engine.
struct GradientTotal {
  double norm_squared = 0;  // of the mean gradient, unscaled
  bool finite = true;
};
// Adds what other engines have found, over the trainer's own group of them: each sums up norm_squared, and finite is
// what all of them are. Called once, on the caller's thread, on every rank or on none. Every rank of an engine must
// come to the same total; where they differ in the last digits, that of its first rank holds for all of them.
using AddOthers = std::function<void(GradientTotal& total)>;

// One optimizer step. Destroying it before update() or discard() discards.
class Step {
 public:
  Step() = default;
  Step(Step&& other) noexcept;
  Step& operator=(Step&& other) noexcept;
  ~Step();
  PassScope begin_pass(PassOptions options = {});
  double loss_scale() const;  // multiply the loss by it; 1 without loss scaling
  // Waits for all gradients; once, after the last pass. The norm and its finiteness are those of all ranks.
  GradientNorm finish_backward(const AddOthers& add_others = {});
  // UsageError where the gradients are not finite. With durable steps the bytes are committed with the step and come
  // back with it (a position in the data, a learning-rate schedule, a random state); waits until the step before is
  // committed.
  void update(std::span<const std::byte> user_bytes = {});
  void discard();  // nothing changes but a dynamic loss scale (UsageError with eager timing)

 private:
  friend class EngineImplementation;
  EngineImplementation* engine_ = nullptr;
};

// What to do where nvme.paths hold a committed run (of the same rank), or CommitOptions::checkpoints any.
enum class ExistingRun : std::uint8_t {
  refuse,     // ConfigError
  resume,     // go on from the newest; where there is none, begin
  overwrite,  // remove them
};

struct CommitOptions {
  ExistingRun existing = ExistingRun::refuse;
  // A folder of checkpoints, `step-N`, that this run will save beside; to go on from, a single one too. Goes on from
  // what was saved later, the newest that is whole or the committed step under nvme.paths. Seen by all ranks.
  std::string checkpoints;
};

// A committed step or a checkpoint that a run goes on from.
struct ResumedStep {
  std::uint64_t step = 0;  // optimizer steps taken
  std::vector<std::byte> user_bytes;
  std::string path;  // of its manifest or checkpoint
};

// How unit accesses are expected before a first step has shown them.
struct ExpectedAccess {
  UnitId unit;
  bool parameters = true;  // its parameters are acquired
  bool gradient = false;   // a gradient is committed (before the parameters are released, where both are set)
  int open_through = 0;    // how many of the following accesses come before this one ends
};

// Replaces parts of the world; all optional.
struct EngineEnvironment {
  std::function<void(LogLevel, std::string_view)> log;  // one line, no newline; empty: silence
  std::shared_ptr<void> device;                         // an offload::Device of the trainer's
  std::shared_ptr<Communicator> communicator;           // of the trainer's own
  std::shared_ptr<void> test_hooks;                     // for the engine's own tests
  // Called now and then, on the caller's thread, while commit() works for long. What it throws leaves commit(), which
  // has then taken nothing. May be empty.
  std::function<void()> check_interrupt = {};
};

class Engine {
 public:
  explicit Engine(const Config& config, EngineEnvironment environment = {});
  ~Engine();  // drains; nothing is left in flight
  Engine(Engine&&) noexcept;
  Engine(const Engine&) = delete;

  // Before commit.
  UnitId add_unit(std::string name, std::vector<ParameterSpec> parameters, UnitOptions options = {});
  ParameterId parameter(UnitId unit, std::string_view name) const;                 // UsageError where there is none
  void expect_order(std::vector<ExpectedAccess> accesses, int micro_batches = 1);  // of one training pass
  // Partitions, places, reserves, compiles; PlanError where it cannot fit. Going on from a committed step: ConfigError
  // where that one is of another model or optimizer, saying what differs; CorruptionError where it is damaged.
  void commit(const CommitOptions& options = {});
  // After commit: the step that this run goes on from; initialize() is not called then.
  const std::optional<ResumedStep>& resumed() const;
  // The newest durable step; nothing without durable steps.
  std::optional<std::uint64_t> committed_step() const;

  // After commit, before the first step. fill(parameter, first element, values): any range, any order, on this thread;
  // it writes all of `values`.
  using Fill = std::function<void(ParameterId parameter, std::int64_t first_element, std::span<float> values)>;
  void initialize(const Fill& fill);

  Step begin_step(StepOptions options = {});
  PassScope begin_pass(PassOptions options);           // evaluation between steps
  ParameterLease acquire(UnitId unit, Stream stream);  // ready on that stream; does not wait
  GradientLease gradients(UnitId unit, Stream stream);

  // Runs all pending updates; with durable steps, until the last of them that is to be is committed; and, between two
  // steps, finish_checkpoint().
  void settle();
  // Current values in fp32 (the exact master). Runs the unit's pending update first.
  void read(ParameterId id, std::int64_t first_element, std::span<float> values);
  // Optimizer states, for tests and export: step count, moments. Same order of elements as read().
  std::uint64_t step_count(ParameterId id);
  void read_moments(ParameterId id, std::int64_t first_element, std::span<float> exp_avg, std::span<float> exp_avg_sq);

  // Between steps, on every rank: the state of now as a checkpoint, in a folder of that path, which all ranks see. An
  // interrupted save leaves an older one of that path as it was. keep: of the `step-N` folders beside it that many
  // stay, the newest (0: all). IoError where it cannot be written: training can go on.
  // With durable steps it returns soon: the step is committed, whatever the cadence, and copied while training goes on;
  // nothing is written over it before. One that is under way is finished first; where that has failed its error is
  // thrown, and nothing is saved.
  // Without durable steps it runs all pending updates and returns once the checkpoint is durable.
  void save_checkpoint(const std::string& path, std::size_t keep = 0);
  // Between steps, on every rank: until the checkpoint under way is in its place; at once where there is none. Throws
  // what has kept it from that: IoError, CorruptionError. The engine's end does the same, and logs the error; it gives
  // the checkpoint up where a step is running, an exception is on its way or the engine has failed.
  void finish_checkpoint();

  Stream stream() const;  // the engine's own compute stream
  Stream make_stream(std::string_view name);
  // The trainer's own stream (a cudaStream_t of the engine's device); it outlives the engine. UsageError on a device
  // without such streams.
  Stream adopt_stream(void* native_handle, std::string_view name);
  std::uint64_t layout_generation() const;          // addresses at a trace position are the same while this is
  Report report() const;                            // effective settings, bytes, times, peaks; cheap
  Timeline timeline() const;                        // what ran when in the last steps: a copy of the log
  void write_trace(const std::string& path) const;  // what the last steps did, for Perfetto
  const Config& config() const;

 private:
  EngineImplementation& implementation() const;  // UsageError where it has been moved from
  std::unique_ptr<EngineImplementation> implementation_;
};

}  // namespace ballast
