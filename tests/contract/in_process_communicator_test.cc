// The contract of communicators over the single one and over threads of this process; and what only threads can show.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/communicators/in_process.h>

#include "communicator_contract.h"
#include "stress/allocation_counter.h"

namespace ballast::testing {

std::vector<World> worlds() {
  std::vector<World> all;
  all.push_back({"single", 1, [](std::chrono::milliseconds, const Body& body) { body(*make_single_communicator()); }});
  for (const int size : {1, 2, 3, 4, 7}) {
    all.push_back(
        {"in_process_" + std::to_string(size), size, [size](std::chrono::milliseconds timeout, const Body& body) {
           auto communicators = make_in_process_communicators(size, {.timeout = timeout});
           std::vector<std::thread> threads;
           for (auto& mine : communicators) {
             threads.emplace_back([&body, own = std::move(mine)]() mutable {
               body(*own);
               own.reset();
             });
           }
           for (auto& thread : threads) thread.join();
         }});
  }
  return all;
}

namespace {

template <class Function>
void on_ranks(const std::vector<std::shared_ptr<Communicator>>& ranks, const Function& body) {
  std::vector<std::thread> threads;
  for (const auto& rank : ranks) threads.emplace_back([&body, &rank] { body(*rank); });
  for (auto& thread : threads) thread.join();
}

TEST(InProcessCommunicator, CallsInTheSteadyStateAllocateNothing) {
#ifdef BALLAST_SANITIZED
  GTEST_SKIP() << "a sanitizer has an operator new of its own";
#endif
  const auto ranks = make_in_process_communicators(3);
  on_ranks(ranks, [](Communicator& c) {
    RankStream stream;
    constexpr std::size_t kPart = 5000;
    std::vector<std::byte> data(kPart * 4 * 3);
    std::vector<double> values(40);
    const auto round = [&] {
      c.all_gather(data.data(), kPart * 4, *stream);
      c.reduce_scatter_sum(data.data(), data.data() + at(c.rank()) * kPart * 4, kPart, DataType::fp32, *stream);
      c.all_reduce_sum(data.data(), kPart, DataType::bf16, *stream);
      stream->synchronize();
      c.all_reduce_sum(values);
      c.broadcast(data, 1);
      c.barrier();
    };
    for (int i = 0; i < 20; ++i) round();
    if (c.rank() == 0) {
      allocations = 0;
      count_allocations = true;
    }
    c.barrier();
    for (int i = 0; i < 50; ++i) round();
    c.barrier();
    if (c.rank() == 0) count_allocations = false;
  });
  EXPECT_EQ(allocations.load(), 0U);
}

TEST(InProcessCommunicator, ARankThatLeavesIsNamedAtOnce) {
  auto ranks = make_in_process_communicators(3, {.timeout = std::chrono::minutes(5)});
  std::thread waiting(
      [&] { EXPECT_THAT(failure_of([&] { ranks[0]->barrier(); }), ::testing::HasSubstr("rank 2 left")); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  ranks[2].reset();
  waiting.join();
  EXPECT_THAT(failure_of([&] { ranks[1]->barrier(); }), ::testing::HasSubstr("rank 2 left"));
}

TEST(InProcessCommunicator, AFailedCallReturnsOnlyWhenNoPeerReadsItsBuffersAnyMore) {
  // Ranks copy large buffers out of each other while one of them gives up; each frees its buffer as soon as its call
  // has ended. The address sanitizer sees a peer that still reads.
  for (int round = 0; round < 30; ++round) {
    const auto ranks = make_in_process_communicators(3, {.timeout = kPatient});
    std::thread aborting([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
      ranks[1]->abort("now");
    });
    on_ranks(ranks, [](Communicator& c) {
      try {
        for (;;) {
          std::vector<std::byte> mine(std::size_t{1} << 20, std::byte{1});
          std::vector<std::byte> all(mine.size() * 3);
          c.all_gather(mine, all);
        }
      } catch (const CommunicationError& error) {
        EXPECT_THAT(error.what(), ::testing::HasSubstr("rank 1 gave up: now"));
      }
    });
    aborting.join();
  }
}

TEST(InProcessCommunicator, WorldsAndTimeoutsThatMakeNoSenseAreRefused) {
  EXPECT_THROW(make_in_process_communicators(0), UsageError);
  EXPECT_THROW(make_in_process_communicators(-3), UsageError);
  EXPECT_THROW(make_in_process_communicators(2, {.timeout = std::chrono::milliseconds(0)}), UsageError);
  EXPECT_EQ(make_in_process_communicators(2, {.timeout = std::chrono::milliseconds::max()}).size(), 2U);
}

}  // namespace
}  // namespace ballast::testing
