// The event that the one waiting thread sleeps on.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/wake_event.h>
#include <fcntl.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace ballast::base {
namespace {

TEST(WakeEvent, ANotificationBeforeTheWaitIsNotLost) {
  WakeEvent event;
  event.notify();
  EXPECT_TRUE(event.wait(0));
}

TEST(WakeEvent, ManyNotificationsAreConsumedByOneWait) {
  WakeEvent event;
  for (int i = 0; i < 1000; ++i) event.notify();
  EXPECT_TRUE(event.wait(-1));
  EXPECT_FALSE(event.wait(0));
}

TEST(WakeEvent, WithoutNotificationTheWaitEndsAtItsTimeout) {
  WakeEvent event;
  EXPECT_FALSE(event.wait(1));
}

TEST(WakeEvent, ItsDescriptorIsClosedOnExec) {
  WakeEvent event;
  EXPECT_NE(::fcntl(event.descriptor(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(WakeEvent, NoNotificationOfSeveralThreadsIsMissed) {
  WakeEvent event;
  std::atomic<int> sent{0};
  std::vector<std::thread> threads;
  constexpr int kThreads = 4, kEach = 2000;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kEach; ++i) {
        sent.fetch_add(1);
        event.notify();
      }
    });
  }
  // Each wait sees what was counted before its notification, so the sum is reached without a timeout.
  while (sent.load() < kThreads * kEach) ASSERT_TRUE(event.wait(10'000));
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace ballast::base
