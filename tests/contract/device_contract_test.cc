// The host device keeps the contract of every device, and what it promises of its own: closures, a capacity, forks.
// SPDX-License-Identifier: Apache-2.0
#include "contract/device_contract.h"

#include <sys/wait.h>
#include <unistd.h>

namespace ballast::offload {
namespace {

class ClosureContract : public DeviceContract {};

TEST_P(ClosureContract, AFailureIsLatchedRethrownOnceAndHangsNothing) {
  const auto stream = device_->make_stream("failing");
  const auto other = device_->make_stream("other");
  const auto event = device_->make_event();
  stream->enqueue([] { throw std::runtime_error("first"); });
  stream->enqueue([] { throw std::runtime_error("second"); });
  bool ran = false;
  stream->enqueue([&] { ran = true; });
  stream->record(*event);
  other->wait(*event);
  other->synchronize();
  EXPECT_TRUE(ran);
  try {
    stream->synchronize();
    FAIL() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "first");
  }
  stream->synchronize();
}

TEST_P(ClosureContract, WhatAClosureHoldsIsGoneOnceItCountsAsDone) {
  const auto stream = device_->make_stream("s");
  auto held = std::make_shared<int>(1);
  stream->enqueue([held] {});
  stream->synchronize();
  EXPECT_EQ(held.use_count(), 1);
}

TEST_P(ClosureContract, WorkThatWaitsForItsOwnStreamFailsInsteadOfHanging) {
  const auto stream = device_->make_stream("self");
  stream->enqueue([&] { stream->synchronize(); });
  EXPECT_THROW(stream->synchronize(), UsageError);
  // More than the queue holds, from its own work.
  stream->enqueue([&] {
    for (int i = 0; i < 100000; ++i) stream->enqueue([] {});
  });
  EXPECT_THROW(stream->synchronize(), UsageError);
  EXPECT_THROW(stream->enqueue(nullptr), UsageError);
}

const auto kHostDevices = testing::Values(Kind{"Host", [] { return make_host_device(); }},
                                          // The same with delays before copies, so that streams overtake one another.
                                          Kind{"HostWithDelays", [] {
                                                 HostDeviceOptions options;
                                                 auto count = std::make_shared<std::atomic<std::uint64_t>>(0);
                                                 options.before_copy = [count](std::string_view, std::size_t) {
                                                   if (base::random_at(7, count->fetch_add(1)) % 16 == 0) {
                                                     std::this_thread::sleep_for(50us);
                                                   }
                                                 };
                                                 return make_host_device(options);
                                               }});
const auto kName = [](const auto& chosen) { return std::string(chosen.param.name); };
INSTANTIATE_TEST_SUITE_P(Devices, DeviceContract, kHostDevices, kName);
INSTANTIATE_TEST_SUITE_P(Devices, ClosureContract, kHostDevices, kName);

TEST(HostDevice, ASlabAboveTheCapacityIsRefusedWithTheNumbers) {
  HostDeviceOptions options;
  options.capacity_bytes = kMiB;
  const auto device = make_host_device(options);
  EXPECT_EQ(device->capacity_bytes(), kMiB);
  try {
    device->take_slab(kMiB + 4096);
    FAIL() << "nothing was thrown";
  } catch (const PlanError& error) {
    EXPECT_THAT(error.what(), HasSubstr("1052672 bytes"));
    EXPECT_THAT(error.what(), HasSubstr("1048576 bytes"));
    EXPECT_THAT(error.what(), HasSubstr("budget.device"));
  }
  EXPECT_NE(device->take_slab(kMiB), nullptr);  // a refusal takes nothing
}

TEST(HostDevice, MoreMemoryThanTheMachineHasIsRefusedBeforeAnythingIsTaken) {
  const auto device = make_host_device();
  EXPECT_GT(device->capacity_bytes(), 0u);
  EXPECT_LE(device->capacity_bytes(), discover_topology().memory_bytes);
  EXPECT_THROW(device->take_slab(std::uint64_t{1} << 50), PlanError);
  EXPECT_THROW(device->take_slab(UINT64_MAX), PlanError);
}

TEST(HostDevice, TheHookSeesEachCopyAndItsFailureIsLatched) {
  HostDeviceOptions options;
  std::vector<std::pair<std::string, std::size_t>> seen;
  options.before_copy = [&](std::string_view stream, std::size_t bytes) {
    seen.emplace_back(std::string(stream), bytes);
    if (bytes == 3) throw IoError("refused by the test");
  };
  const auto device = make_host_device(options);
  const auto stream = device->make_stream("lane");
  char from[4] = {1, 2, 3, 4};
  char to[4] = {};
  stream->copy(to, from, 4);
  stream->copy(to, from, 3);
  EXPECT_THROW(stream->synchronize(), IoError);
  EXPECT_EQ(seen, (std::vector<std::pair<std::string, std::size_t>>{{"lane", 4}, {"lane", 3}}));
}

TEST(HostDevice, IsNamedAndAddressable) {
  const auto device = make_host_device();
  EXPECT_EQ(device->name(), "host");
  EXPECT_TRUE(device->host_addressable());
  EXPECT_EQ(device->make_stream("s")->native_handle(), nullptr);
}

// A child has no stream threads, and may have been forked while one held its lock.
TEST(HostDevice, AForkedChildCanLetGoOfADeviceInUse) {
  auto device = make_host_device();
  device->take_slab(4 * kMiB);
  auto busy = device->make_stream("busy");
  auto idle = device->make_stream("idle");
  for (int i = 0; i < 500; ++i) busy->enqueue([] { std::this_thread::sleep_for(100us); });
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);  // ends a child that hangs
    busy.reset();
    idle.reset();
    device.reset();
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  busy->synchronize();
}

}  // namespace
}  // namespace ballast::offload
