// ThrottledStorage.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/check.h>
#include <ballast/io/testing/throttled_storage.h>

#include <algorithm>
#include <array>

namespace ballast::io::testing {

ThrottledStorage::ThrottledStorage(std::unique_ptr<Storage> inner, Throttle throttle, base::WakeEvent* wake)
    : inner_(std::move(inner)), throttle_(throttle), wake_(wake), busy_until_(Clock::now()) {
  BALLAST_CHECK(throttle.bytes_per_second > 0);
  if (wake_ != nullptr) alarm_thread_ = std::thread([this] { run(); });
}

ThrottledStorage::~ThrottledStorage() {
  if (!alarm_thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  alarm_thread_.join();
}

void ThrottledStorage::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (alarm_ == Clock::time_point::max()) {
      changed_.wait(lock);
    } else if (Clock::now() < alarm_) {
      changed_.wait_until(lock, alarm_);
    } else {
      alarm_ = Clock::time_point::max();
      wake_->notify();
    }
  }
}

void ThrottledStorage::ring_at(Clock::time_point time) {
  if (wake_ == nullptr) return;
  {
    const std::lock_guard lock(mutex_);
    alarm_ = time;
  }
  changed_.notify_one();
}

void ThrottledStorage::submit(std::span<Operation* const> operations) {
  const Clock::time_point now = Clock::now();
  for (Operation* const operation : operations) {
    const std::chrono::duration<double> transfer(static_cast<double>(operation->bytes) / throttle_.bytes_per_second);
    busy_until_ = std::max(busy_until_, now) + std::chrono::duration_cast<Clock::duration>(transfer);
    due_.push_back({operation, busy_until_ + throttle_.latency, false});
  }
  inner_->submit(operations);
  if (!due_.empty()) ring_at(due_.front().time);
}

std::size_t ThrottledStorage::poll(std::span<Operation*> finished, bool wait) {
  BALLAST_CHECK(!finished.empty());
  std::array<Operation*, 32> arrived;
  for (;;) {
    // Waiting here is for the wrapped storage while the first one to go back is still in its hands, else for the clock.
    const bool inner_wait =
        wait && !due_.empty() && std::none_of(due_.begin(), due_.end(), [](const Due& entry) { return entry.arrived; });
    const std::size_t count = inner_->poll(arrived, inner_wait);
    for (std::size_t i = 0; i < count; ++i) {
      const auto place =
          std::find_if(due_.begin(), due_.end(), [&](const Due& entry) { return entry.operation == arrived[i]; });
      BALLAST_CHECK(place != due_.end());
      place->arrived = true;
    }
    std::size_t released = 0;
    const Clock::time_point now = Clock::now();
    Clock::time_point next = Clock::time_point::max();
    for (auto entry = due_.begin(); entry != due_.end() && released < finished.size();) {
      if (entry->arrived && entry->time <= now) {
        finished[released++] = entry->operation;
        entry = due_.erase(entry);
      } else {
        if (entry->arrived) next = std::min(next, entry->time);
        ++entry;
      }
    }
    if (released > 0 || !wait || due_.empty()) {
      if (!due_.empty()) ring_at(released == finished.size() ? now : next);
      return released;
    }
    if (next != Clock::time_point::max())
      std::this_thread::sleep_until(std::min(next, now + std::chrono::milliseconds(1)));
  }
}

}  // namespace ballast::io::testing
