// FaultyStorage.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/base/size.h>
#include <ballast/io/testing/faulty_storage.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace ballast::io::testing {

FaultyStorage::FaultyStorage(std::unique_ptr<Storage> inner, Faults faults, base::WakeEvent* wake)
    : inner_(std::move(inner)), faults_(std::move(faults)), wake_(wake), random_(faults_.seed) {
  BALLAST_CHECK(!faults_.error_numbers.empty());
}

FaultyStorage::~FaultyStorage() = default;

void FaultyStorage::submit(std::span<Operation* const> operations) { inner_->submit(operations); }

void FaultyStorage::cancel(Operation& operation) {
  const bool held =
      std::any_of(held_.begin(), held_.end(), [&](const Held& entry) { return entry.operation == &operation; });
  if (!held) inner_->cancel(operation);
}

void FaultyStorage::spoil(Operation& operation) {
  if (operation.state != OperationState::done || operation.error_number != 0 || operation.bytes == 0) return;
  const std::uint64_t draw = random_.below(1000);
  if (draw < faults_.errors_per_mille) {
    operation.error_number = faults_.error_numbers[random_.below(faults_.error_numbers.size())];
    operation.transferred_bytes = 0;
    ++errors_;
  } else if (draw < faults_.errors_per_mille + faults_.shorts_per_mille) {
    operation.error_number = EIO;
    operation.transferred_bytes = base::round_down(random_.below(operation.bytes), inner_->alignment_bytes());
    ++shorts_;
  } else if (draw < faults_.errors_per_mille + faults_.shorts_per_mille + faults_.flips_per_mille &&
             operation.direction == Direction::read) {
    const std::uint64_t bit = random_.below(operation.bytes * 8);
    operation.data[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    ++flips_;
  }
}

std::size_t FaultyStorage::poll(std::span<Operation*> finished, bool wait) {
  BALLAST_CHECK(!finished.empty());
  std::array<Operation*, 32> arrived;
  for (;;) {
    ++polls_;
    const bool inner_wait = wait && held_.empty();
    const std::size_t count = inner_->poll(arrived, inner_wait);
    for (std::size_t i = 0; i < count; ++i) {
      spoil(*arrived[i]);
      held_.push_back({arrived[i], polls_ + random_.below(faults_.delay_polls_max + 1)});
    }
    std::size_t released = 0;
    for (std::size_t i = 0; i < held_.size() && released < finished.size();) {
      if (held_[i].release_poll > polls_) {
        ++i;
        continue;
      }
      finished[released++] = held_[i].operation;
      held_[i] = held_.back();
      held_.pop_back();
    }
    if (released > 0 || !wait || outstanding() == 0) {
      if (!held_.empty() && wake_ != nullptr) wake_->notify();
      return released;
    }
  }
}

}  // namespace ballast::io::testing
