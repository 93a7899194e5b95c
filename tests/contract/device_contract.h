// What every Device promises: order within a stream, events as places in it, one slab. A program that includes this
// instantiates DeviceContract for its devices.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <future>
#include <new>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "ballast/base/error.h"
#include "ballast/base/random.h"
#include "ballast/base/size.h"
#include "ballast/offload/device.h"
#include "ballast/offload/topology.h"

// Allocations are counted, for the promise that queueing work makes none. A sanitizer has an allocator of its own.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define BALLAST_COUNTS_ALLOCATIONS 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define BALLAST_COUNTS_ALLOCATIONS 0
#endif
#endif
#ifndef BALLAST_COUNTS_ALLOCATIONS
#define BALLAST_COUNTS_ALLOCATIONS 1
#endif

namespace {
std::atomic<std::uint64_t> allocations{0};
}  // namespace

#if BALLAST_COUNTS_ALLOCATIONS
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* const memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
#endif

namespace ballast::offload {
namespace {

using base::kMiB;
using testing::HasSubstr;
using namespace std::chrono_literals;

struct Kind {
  const char* name;
  std::unique_ptr<Device> (*make)();
};

class DeviceContract : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    if (device_ == nullptr) GTEST_SKIP() << "there is no such device on this machine";
  }
  std::unique_ptr<Device> device_ = GetParam().make();
};

// Host work in order with the stream: a closure where the device computes with those, else a call.
inline void run(Stream& stream, std::function<void()> work) {
  if (stream.native_handle() == nullptr) {
    stream.enqueue(std::move(work));
    return;
  }
  stream.call({[](void* context, std::uint64_t) {
                 const std::unique_ptr<std::function<void()>> own(static_cast<std::function<void()>*>(context));
                 (*own)();
               },
               new std::function<void()>(std::move(work)), 0});
}

// Holds a stream until open() is called.
class Gate {
 public:
  void hold(Stream& stream) {
    run(stream, [opened = opened_] { opened.wait(); });
  }
  void open() { promise_.set_value(); }

 private:
  std::promise<void> promise_;
  std::shared_future<void> opened_ = promise_.get_future().share();
};

TEST_P(DeviceContract, CopiesArriveAtAnySizeAndAlignment) {
  const auto stream = device_->make_stream("copy");
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{4097}, std::size_t{3 * kMiB + 5}}) {
    for (const std::size_t shift : {std::size_t{0}, std::size_t{1}, std::size_t{63}}) {
      std::vector<unsigned char> source(bytes + shift);
      for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<unsigned char>(base::mix(i));
      std::vector<unsigned char> destination(bytes + 2, 0xEE);
      stream->copy(destination.data() + 1, source.data() + shift, bytes);
      stream->synchronize();
      EXPECT_EQ(destination.front(), 0xEE);
      EXPECT_EQ(destination.back(), 0xEE);
      if (bytes != 0) {
        EXPECT_EQ(std::memcmp(destination.data() + 1, source.data() + shift, bytes), 0);
      }
    }
  }
}

TEST_P(DeviceContract, WorkOfOneStreamRunsInTheOrderGiven) {
  const auto stream = device_->make_stream("order");
  std::vector<std::uint64_t> seen;
  seen.reserve(5000);
  for (std::uint64_t i = 0; i < 5000; ++i) {
    if (i % 2 == 0) {
      run(*stream, [&seen, i] { seen.push_back(i); });
    } else {
      stream->call({[](void* context, std::uint64_t argument) {
                      static_cast<std::vector<std::uint64_t>*>(context)->push_back(argument);
                    },
                    &seen, i});
    }
  }
  stream->synchronize();
  std::vector<std::uint64_t> expected(5000);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(seen, expected);
}

TEST_P(DeviceContract, AnEventThatWasNeverRecordedIsReachedAndHoldsNobody) {
  const auto stream = device_->make_stream("s");
  const auto event = device_->make_event();
  EXPECT_TRUE(event->reached());
  event->synchronize();
  stream->wait(*event);
  stream->synchronize();
}

TEST_P(DeviceContract, AnEventOfAnotherKindOfDeviceIsRefused) {
  class ForeignEvent final : public Event {
    bool reached() const override { return true; }
    void synchronize() override {}
  };
  ForeignEvent foreign;
  const auto stream = device_->make_stream("s");
  EXPECT_THROW(stream->record(foreign), UsageError);
  EXPECT_THROW(stream->wait(foreign), UsageError);
}

TEST_P(DeviceContract, AStreamMayWaitForItsOwnRecord) {
  const auto stream = device_->make_stream("s");
  const auto event = device_->make_event();
  for (int i = 0; i < 3; ++i) {
    run(*stream, [] { std::this_thread::sleep_for(1ms); });
    stream->record(*event);
    stream->wait(*event);
  }
  stream->synchronize();
  EXPECT_TRUE(event->reached());
}

TEST_P(DeviceContract, AWaitHoldsLaterWorkUntilTheRecordIsReached) {
  const auto first = device_->make_stream("first");
  const auto second = device_->make_stream("second");
  const auto event = device_->make_event();
  Gate gate;
  gate.hold(*first);
  int value = 0;
  run(*first, [&] { value = 1; });
  first->record(*event);
  second->wait(*event);
  int seen = -1;
  std::atomic<bool> ran{false};
  run(*second, [&] {
    seen = value;
    ran = true;
  });
  std::this_thread::sleep_for(5ms);
  EXPECT_FALSE(event->reached());
  EXPECT_FALSE(ran.load());
  gate.open();
  second->synchronize();
  EXPECT_EQ(seen, 1);
  EXPECT_TRUE(event->reached());
}

TEST_P(DeviceContract, AWaitKeepsTheRecordThatWasLastWhenItWasCalled) {
  const auto first = device_->make_stream("first");
  const auto second = device_->make_stream("second");
  const auto event = device_->make_event();
  Gate early;
  Gate late;
  early.hold(*first);
  first->record(*event);
  second->wait(*event);
  late.hold(*first);
  first->record(*event);  // moves the event, not the wait
  early.open();
  second->synchronize();
  EXPECT_FALSE(event->reached());
  late.open();
  event->synchronize();
  EXPECT_TRUE(event->reached());
}

TEST_P(DeviceContract, AnEventRecordedOnAnotherStreamFollowsThatStream) {
  const auto held = device_->make_stream("held");
  const auto open = device_->make_stream("open");
  const auto third = device_->make_stream("third");
  const auto event = device_->make_event();
  Gate gate;
  gate.hold(*held);
  held->record(*event);
  third->wait(*event);  // waits for the held stream, whatever happens to the event
  open->record(*event);
  event->synchronize();
  EXPECT_TRUE(event->reached());
  std::atomic<bool> ran{false};
  run(*third, [&] { ran = true; });
  std::this_thread::sleep_for(5ms);
  EXPECT_FALSE(ran.load());
  gate.open();
  third->synchronize();
  EXPECT_TRUE(ran.load());
}

TEST_P(DeviceContract, AnEventMayGoWhileAWaitForItIsQueued) {
  const auto first = device_->make_stream("first");
  const auto second = device_->make_stream("second");
  Gate gate;
  gate.hold(*first);
  {
    const auto event = device_->make_event();
    first->record(*event);
    second->wait(*event);
  }
  gate.open();
  second->synchronize();
}

TEST_P(DeviceContract, AnEventOutlivesItsStream) {
  const auto event = device_->make_event();
  {
    const auto stream = device_->make_stream("short");
    run(*stream, [] { std::this_thread::sleep_for(2ms); });
    stream->record(*event);
  }
  EXPECT_TRUE(event->reached());
  event->synchronize();
}

TEST_P(DeviceContract, AStreamEndsItsWorkBeforeItGoes) {
  int done = 0;
  {
    const auto stream = device_->make_stream("drained");
    run(*stream, [] { std::this_thread::sleep_for(5ms); });
    for (int i = 0; i < 100; ++i) run(*stream, [&] { ++done; });
  }
  EXPECT_EQ(done, 100);
}

TEST_P(DeviceContract, AFullQueueMakesTheCallerWaitAndLosesNothing) {
  const auto stream = device_->make_stream("full");
  Gate gate;
  gate.hold(*stream);
  std::atomic<int> queued{0};
  int done = 0;
  std::thread caller([&] {
    for (int i = 0; i < 20000; ++i) {
      run(*stream, [&] { ++done; });
      queued.fetch_add(1);
    }
  });
  std::this_thread::sleep_for(50ms);
  EXPECT_LT(queued.load(), 20000);
  gate.open();
  caller.join();
  stream->synchronize();
  EXPECT_EQ(done, 20000);
}

TEST_P(DeviceContract, ThreadsMayShareAStream) {
  const auto stream = device_->make_stream("shared");
  std::vector<std::vector<int>> seen(4);  // written by the stream alone
  std::vector<std::thread> callers;
  for (std::size_t caller = 0; caller < seen.size(); ++caller) {
    callers.emplace_back([&, caller] {
      for (int i = 0; i < 1000; ++i) run(*stream, [&seen, caller, i] { seen[caller].push_back(i); });
    });
  }
  for (std::thread& caller : callers) caller.join();
  stream->synchronize();
  std::vector<int> expected(1000);
  std::iota(expected.begin(), expected.end(), 0);
  for (const auto& order : seen) EXPECT_EQ(order, expected);
}

// A token passes over the streams by seed; each hop reads what the hop before it wrote. One missed wait shows.
TEST_P(DeviceContract, ATokenPassedOverStreamsByEventsArrivesIntact) {
  const std::uint64_t seed = 20240611;
  SCOPED_TRACE("seed " + std::to_string(seed) + ": --gtest_filter=*ATokenPassedOverStreams*");
  base::Random random(seed);
  std::array<std::unique_ptr<Stream>, 4> streams;
  for (std::size_t i = 0; i < streams.size(); ++i) streams[i] = device_->make_stream("s" + std::to_string(i));
  const auto event = device_->make_event();
  constexpr std::size_t kElements = 1024;
  std::vector<std::vector<std::uint32_t>> places(streams.size(), std::vector<std::uint32_t>(kElements, 0));
  std::size_t at = 0;
  constexpr std::uint32_t kHops = 4000;
  for (std::uint32_t hop = 0; hop < kHops; ++hop) {
    const std::size_t to = (at + 1 + random.below(streams.size() - 1)) % streams.size();
    streams[to]->wait(*event);
    streams[to]->copy(places[to].data(), places[at].data(), kElements * sizeof(std::uint32_t));
    run(*streams[to], [&place = places[to]] {
      for (std::uint32_t& value : place) ++value;
    });
    streams[to]->record(*event);
    at = to;
  }
  event->synchronize();
  EXPECT_EQ(places[at], std::vector<std::uint32_t>(kElements, kHops));
}

TEST_P(DeviceContract, QueueingCopiesCallsAndEventsAllocatesNothing) {
  if (!BALLAST_COUNTS_ALLOCATIONS) GTEST_SKIP() << "allocations are not counted under this sanitizer";
  const auto first = device_->make_stream("first");
  const auto second = device_->make_stream("second");
  const auto event = device_->make_event();
  std::array<char, 64> from{};
  std::array<char, 64> to{};
  const auto round = [&] {
    first->copy(to.data(), from.data(), from.size());
    first->call({[](void*, std::uint64_t) {}, nullptr, 0});
    first->record(*event);
    second->wait(*event);
    second->call({[](void*, std::uint64_t) {}, nullptr, 0});
    (void)event->reached();
  };
  for (int i = 0; i < 100; ++i) round();
  first->synchronize();
  second->synchronize();
  const std::uint64_t before = allocations.load();
  for (int i = 0; i < 3000; ++i) round();
  first->synchronize();
  second->synchronize();
  EXPECT_EQ(allocations.load(), before);
}

TEST_P(DeviceContract, TheSlabIsAlignedWritableTakenOnceAndNotInherited) {
  std::byte* const slab = device_->take_slab(8 * kMiB + 1);
  ASSERT_NE(slab, nullptr);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(slab) % 4096, 0u);
  if (device_->host_addressable()) {
    std::memset(slab, 0x5A, 8 * kMiB + 1);
    EXPECT_EQ(slab[8 * kMiB], std::byte{0x5A});
  }
  EXPECT_THROW(device_->take_slab(4096), UsageError);
}

}  // namespace
}  // namespace ballast::offload
