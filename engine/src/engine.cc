// The public classes: thin handles onto the implementation.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/engine/engine.h>

#include <string>
#include <utility>

#include "engine_implementation.h"

namespace ballast {

namespace {

// A call that every rank makes: where the others do not come, the error says so.
template <class Call>
void on_every_rank(const char* name, const Call& call) {
  try {
    call();
  } catch (const CommunicationError& error) {
    throw CommunicationError(std::string(name) + ", which every rank calls: " + error.what());
  }
}

}  // namespace

void Stream::enqueue(std::function<void()> work) {
  if (stream_ == nullptr) throw UsageError("Stream::enqueue on an empty stream; take one from Engine::stream()");
  static_cast<offload::Stream*>(stream_)->enqueue(std::move(work));
}

void Stream::synchronize() {
  if (stream_ == nullptr) throw UsageError("Stream::synchronize on an empty stream; take one from Engine::stream()");
  static_cast<offload::Stream*>(stream_)->synchronize();
}

void* Stream::native_handle() const {
  return stream_ == nullptr ? nullptr : static_cast<offload::Stream*>(stream_)->native_handle();
}

// --- leases ----------------------------------------------------------------------------------------------------------

ParameterLease::ParameterLease(ParameterLease&& other) noexcept
    : engine_(std::exchange(other.engine_, nullptr)), id_(other.id_) {}

ParameterLease& ParameterLease::operator=(ParameterLease&& other) noexcept {
  if (this != &other) {
    if (engine_ != nullptr) std::exchange(engine_, nullptr)->release_parameters(id_, nullptr);
    engine_ = std::exchange(other.engine_, nullptr);
    id_ = other.id_;
  }
  return *this;
}

ParameterLease::~ParameterLease() {
  if (engine_ != nullptr) engine_->release_parameters(id_, nullptr);
}

Tensor ParameterLease::operator[](ParameterId id) const {
  if (engine_ == nullptr) throw UsageError("these parameters have been released");
  return engine_->parameter_tensor(id_, id);
}

void ParameterLease::wait() {
  if (engine_ == nullptr) throw UsageError("these parameters have been released");
  engine_->wait_parameters(id_);
}

void ParameterLease::release(Stream stream) {
  if (engine_ == nullptr) throw UsageError("these parameters have been released already");
  std::exchange(engine_, nullptr)->release_parameters(id_, &stream);
}

void ParameterLease::release() {
  if (engine_ == nullptr) throw UsageError("these parameters have been released already");
  std::exchange(engine_, nullptr)->release_parameters(id_, nullptr);
}

GradientLease::GradientLease(GradientLease&& other) noexcept
    : engine_(std::exchange(other.engine_, nullptr)), id_(other.id_) {}

GradientLease& GradientLease::operator=(GradientLease&& other) noexcept {
  if (this != &other) {
    if (engine_ != nullptr) std::exchange(engine_, nullptr)->discard_gradients(id_);
    engine_ = std::exchange(other.engine_, nullptr);
    id_ = other.id_;
  }
  return *this;
}

GradientLease::~GradientLease() {
  if (engine_ != nullptr) engine_->discard_gradients(id_);
}

Tensor GradientLease::operator[](ParameterId id) const {
  if (engine_ == nullptr) throw UsageError("these gradients have been committed");
  return engine_->gradient_tensor(id_, id);
}

void GradientLease::absent(ParameterId id) {
  if (engine_ == nullptr) throw UsageError("these gradients have been committed");
  engine_->mark_absent(id_, id);
}

void GradientLease::commit(Stream stream) {
  if (engine_ == nullptr) throw UsageError("these gradients have been committed already");
  std::exchange(engine_, nullptr)->commit_gradients(id_, stream, false);
}

void GradientLease::commit_partial(Stream stream) {
  if (engine_ == nullptr) throw UsageError("these gradients have been committed already");
  std::exchange(engine_, nullptr)->commit_gradients(id_, stream, true);
}

// --- passes and steps ------------------------------------------------------------------------------------------------

PassScope::PassScope(PassScope&& other) noexcept
    : engine_(std::exchange(other.engine_, nullptr)), serial_(other.serial_) {}

PassScope& PassScope::operator=(PassScope&& other) noexcept {
  std::swap(engine_, other.engine_);
  std::swap(serial_, other.serial_);
  return *this;
}

PassScope::~PassScope() { end(); }

void PassScope::end() {
  if (engine_ != nullptr) std::exchange(engine_, nullptr)->end_pass(serial_);
}

Step::Step(Step&& other) noexcept : engine_(std::exchange(other.engine_, nullptr)) {}

Step& Step::operator=(Step&& other) noexcept {
  std::swap(engine_, other.engine_);
  return *this;
}

Step::~Step() {
  if (engine_ != nullptr) engine_->abandon_step();
}

PassScope Step::begin_pass(PassOptions options) {
  if (engine_ == nullptr) throw UsageError("this step is over");
  return engine_->begin_pass(options, true);
}

double Step::loss_scale() const {
  if (engine_ == nullptr) throw UsageError("this step is over");
  return engine_->loss_scale();
}

GradientNorm Step::finish_backward(const AddOthers& add_others) {
  if (engine_ == nullptr) throw UsageError("this step is over");
  return engine_->finish_backward(add_others);
}

void Step::update(std::span<const std::byte> user_bytes) {
  if (engine_ == nullptr) throw UsageError("this step is over");
  engine_->update(user_bytes);
  engine_ = nullptr;
}

void Step::discard() {
  if (engine_ == nullptr) throw UsageError("this step is over");
  engine_->discard();
  engine_ = nullptr;
}

// --- engine ----------------------------------------------------------------------------------------------------------

Engine::Engine(const Config& config, EngineEnvironment environment)
    : implementation_(std::make_unique<EngineImplementation>(config, std::move(environment))) {}
Engine::~Engine() = default;
Engine::Engine(Engine&&) noexcept = default;

EngineImplementation& Engine::implementation() const {
  if (implementation_ == nullptr) throw UsageError("this engine has been moved from");
  return *implementation_;
}

UnitId Engine::add_unit(std::string name, std::vector<ParameterSpec> parameters, UnitOptions options) {
  return implementation().add_unit(std::move(name), std::move(parameters), std::move(options));
}
ParameterId Engine::parameter(UnitId unit, std::string_view name) const {
  return implementation().parameter(unit, name);
}
void Engine::expect_order(std::vector<ExpectedAccess> accesses, int micro_batches) {
  implementation().expect_order(std::move(accesses), micro_batches);
}
void Engine::commit(const CommitOptions& options) {
  on_every_rank("commit", [&] { implementation().commit(options); });
}
const std::optional<ResumedStep>& Engine::resumed() const { return implementation().resumed(); }
std::optional<std::uint64_t> Engine::committed_step() const { return implementation().committed_step(); }
void Engine::initialize(const Fill& fill) { implementation().initialize(fill); }
Step Engine::begin_step(StepOptions options) { return implementation().begin_step(std::move(options)); }
PassScope Engine::begin_pass(PassOptions options) { return implementation().begin_pass(options, false); }
ParameterLease Engine::acquire(UnitId unit, Stream stream) { return implementation().acquire(unit, stream); }
GradientLease Engine::gradients(UnitId unit, Stream stream) { return implementation().gradients(unit, stream); }
void Engine::save_checkpoint(const std::string& path, std::size_t keep) {
  on_every_rank("save_checkpoint", [&] { implementation().save_checkpoint(path, keep); });
}

void Engine::finish_checkpoint() {
  on_every_rank("finish_checkpoint", [&] { implementation().finish_checkpoint(); });
}
void Engine::settle() {
  on_every_rank("settle", [&] { implementation().settle(); });
}
void Engine::read(ParameterId id, std::int64_t first_element, std::span<float> values) {
  on_every_rank("read", [&] { implementation().read(id, first_element, values); });
}
void Engine::read_moments(ParameterId id, std::int64_t first_element, std::span<float> exp_avg,
                          std::span<float> exp_avg_sq) {
  on_every_rank("read_moments", [&] { implementation().read_moments(id, first_element, exp_avg, exp_avg_sq); });
}
std::uint64_t Engine::step_count(ParameterId id) { return implementation().step_count(id); }
Stream Engine::stream() const { return implementation().stream(); }
Stream Engine::make_stream(std::string_view name) { return implementation().make_stream(name); }
Stream Engine::adopt_stream(void* native_handle, std::string_view name) {
  return implementation().adopt_stream(native_handle, name);
}
std::uint64_t Engine::layout_generation() const { return implementation().layout_generation(); }
Report Engine::report() const { return implementation().report(); }
Timeline Engine::timeline() const { return implementation().timeline(); }
void Engine::write_trace(const std::string& path) const { implementation().write_trace(path); }
const Config& Engine::config() const { return implementation().config(); }

}  // namespace ballast
