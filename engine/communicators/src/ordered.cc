// Places in the order, calls queued on streams, and the public face of CPU communicators.
// SPDX-License-Identifier: Apache-2.0
#include "ordered.h"

#include <ballast/base/error.h>
#include <ballast/offload/device.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <utility>

namespace ballast::communicators {

std::chrono::nanoseconds effective_timeout(const CommunicatorOptions& options) {
  if (options.timeout.count() <= 0) {
    throw UsageError("a communicator's timeout of " + std::to_string(options.timeout.count()) + " ms: it is positive");
  }
  return std::min<std::chrono::milliseconds>(options.timeout, std::chrono::hours(24 * 30));
}

bool FailureLatch::set(std::string_view text) noexcept {
  const std::lock_guard lock(mutex_);
  if (failed_.load(std::memory_order_relaxed)) return false;
  try {
    text_ = text;
  } catch (const std::bad_alloc&) {
    text_.clear();  // failed() still tells
  }
  failed_.store(true, std::memory_order_release);
  return true;
}

std::string FailureLatch::text() const {
  const std::lock_guard lock(mutex_);
  return text_;
}

void FailureLatch::throw_if_failed() const {
  if (failed()) throw CommunicationError(text());
}

// A failure that the transport does not know of, such as memory that ran out, leaves this rank behind: it gives up, so
// that the others hear of it now.
template <class Work>
auto OrderedState::guarded(const Work& work) {
  try {
    return work();
  } catch (const CommunicationError&) {
    throw;
  } catch (const UsageError&) {
    throw;  // the same on every rank
  } catch (const std::exception& error) {
    abort(error.what());
    throw;
  }
}

void OrderedState::run(Call call) {
  check();
  call.signature.sequence = next_sequence_.fetch_add(1, std::memory_order_relaxed);
  guarded([&] { perform(call); });
}

std::shared_ptr<OrderedState> OrderedState::run_child(Call call) {
  check();
  call.signature.sequence = next_sequence_.fetch_add(1, std::memory_order_relaxed);
  return guarded([&] { return perform_child(call); });
}

void OrderedState::run_on(offload::Stream& stream, Call call) {
  check();
  Record* record = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (free_records_ == nullptr) {
      records_.emplace_back();
      free_records_ = &records_.back();
    }
    record = std::exchange(free_records_, free_records_->next_free);
    record->owner = shared_from_this();
    ++queued_;
  }
  call.signature.sequence = next_sequence_.fetch_add(1, std::memory_order_relaxed);
  record->call = call;
  try {
    stream.call({&run_record, record, 0});
  } catch (const std::exception& error) {
    abort(error.what());
    const std::lock_guard lock(mutex_);
    record->owner.reset();
    record->next_free = std::exchange(free_records_, record);
    --queued_;
    throw;
  }
}

void OrderedState::run_record(void* context, std::uint64_t) {
  auto* const record = static_cast<Record*>(context);
  const std::shared_ptr<OrderedState> state = std::move(record->owner);
  try {
    state->guarded([&] { state->perform(record->call); });
  } catch (const std::exception&) {
    // Latched: the next call and check() throw it.
  }
  const std::lock_guard lock(state->mutex_);
  record->next_free = std::exchange(state->free_records_, record);
  if (--state->queued_ == 0) state->idle_.notify_all();
}

void OrderedState::close() noexcept {
  std::unique_lock lock(mutex_);
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  if (!idle_.wait_until(lock, deadline, [&] { return queued_ == 0; })) {
    const std::uint64_t waiting = queued_;
    lock.unlock();
    abort("its communicator was destroyed while " + std::to_string(waiting) + " calls waited on a stream");
    return;
  }
  lock.unlock();
  leave();
}

namespace {

class OrderedCommunicator final : public Communicator {
 public:
  explicit OrderedCommunicator(std::shared_ptr<OrderedState> state) : state_(std::move(state)) {}
  ~OrderedCommunicator() override { state_->close(); }
  OrderedCommunicator(const OrderedCommunicator&) = delete;
  OrderedCommunicator& operator=(const OrderedCommunicator&) = delete;

  std::string_view name() const override { return state_->name(); }
  int world_size() const override { return state_->members().count(); }
  int rank() const override { return state_->members().rank(); }

  void all_reduce_sum(std::span<double> values) override {
    state_->run({signature(CallKind::sum_values, values.size_bytes()), as_bytes(values.data()),
                 reinterpret_cast<std::byte*>(values.data())});
  }
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    const auto ranks = static_cast<std::size_t>(world_size());
    if (all.size() / ranks != mine.size() || all.size() % ranks != 0) {
      throw UsageError("all_gather of " + std::to_string(mine.size()) + " bytes a rank over " + std::to_string(ranks) +
                       " ranks wants room for their product, not " + std::to_string(all.size()) + " bytes");
    }
    state_->run({signature(CallKind::gather_bytes, mine.size()), mine.data(), all.data()});
  }
  void broadcast(std::span<std::byte> data, int root) override {
    if (root < 0 || root >= world_size()) {
      throw UsageError("broadcast from rank " + std::to_string(root) + " of " + std::to_string(world_size()));
    }
    state_->run({signature(CallKind::broadcast, data.size(), DataType::fp32, root), data.data(), data.data()});
  }
  void barrier() override { state_->run({signature(CallKind::barrier, 0)}); }

  void set_unit(std::uint32_t unit) override { unit_ = unit; }
  void all_gather(std::byte* data, std::size_t part_bytes, offload::Stream& stream) override {
    require_product(part_bytes, static_cast<std::size_t>(world_size()), "all_gather");
    state_->run_on(stream, {large_signature(CallKind::all_gather, part_bytes), data, data});
  }
  void reduce_scatter_sum(const std::byte* data, std::byte* part, std::size_t part_elements, DataType type,
                          offload::Stream& stream) override {
    require_product(part_elements, static_cast<std::size_t>(world_size()) * 4, "reduce_scatter_sum");
    state_->run_on(stream,
                   {large_signature(CallKind::reduce_scatter, part_elements * element_bytes(type), type), data, part});
  }
  void all_reduce_sum(std::byte* data, std::size_t elements, DataType type, offload::Stream& stream) override {
    require_product(elements, 4, "all_reduce_sum");
    state_->run_on(stream, {large_signature(CallKind::all_reduce, elements * element_bytes(type), type), data, data});
  }

  std::shared_ptr<Communicator> duplicate() override {
    return make_communicator(state_->run_child({signature(CallKind::duplicate, 0)}));
  }
  std::shared_ptr<Communicator> split(int color) override {
    return make_communicator(state_->run_child({signature(CallKind::split, 0), nullptr, nullptr, color}));
  }
  void check() const override { state_->check(); }
  void abort(std::string_view reason) noexcept override { state_->abort(reason); }

 private:
  static Signature signature(CallKind kind, std::size_t bytes, DataType type = DataType::fp32, int root = 0) {
    Signature s;
    s.bytes = bytes;
    s.root = root;
    s.kind = kind;
    s.type = type;
    return s;
  }
  Signature large_signature(CallKind kind, std::size_t bytes, DataType type = DataType::fp32) const {
    Signature s = signature(kind, bytes, type);
    s.unit = unit_;
    return s;
  }
  static const std::byte* as_bytes(const double* values) { return reinterpret_cast<const std::byte*>(values); }
  static void require_product(std::size_t a, std::size_t b, const char* call) {
    if (a > std::numeric_limits<std::size_t>::max() / b) {
      throw UsageError(std::string(call) + " of " + std::to_string(a) + " does not fit an address space");
    }
  }

  const std::shared_ptr<OrderedState> state_;
  std::uint32_t unit_ = kNoUnit;  // of large calls
};

}  // namespace

std::shared_ptr<Communicator> make_communicator(std::shared_ptr<OrderedState> state) {
  return std::make_shared<OrderedCommunicator>(std::move(state));
}

}  // namespace ballast::communicators
