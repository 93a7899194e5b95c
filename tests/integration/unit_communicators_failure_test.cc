// Units that only some ranks have: what one rank's failure does to all groups, and what is refused.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/io/testing/faulty_storage.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "executor.h"
#include "support/engine_support.h"
#include "support/on_ranks.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using testing::on_ranks;
using testing::plain_config;
using testing::SyntheticUnit;
using testing::TemporaryDirectory;
using testing::Watchdog;

constexpr int kRanks = 4;

TEST(UnitCommunicatorsFailureTest, ARankWhoseDriveFailsEndsAllGroups) {
  const Watchdog watchdog(100);
  const TemporaryDirectory directory;
  std::vector<std::string> texts(kRanks);
  on_ranks(kRanks, [&](int rank, const std::shared_ptr<Communicator>& world) {
    auto hooks = std::make_shared<engine::TestHooks>();
    if (rank == 3) {
      hooks->storage_factory = [&](io::Backend backend, const io::StorageOptions& options, const std::string&) {
        io::OpenedStorage opened = io::open_storage(backend, options);
        opened.storage = std::make_unique<io::testing::FaultyStorage>(
            std::move(opened.storage), io::testing::Faults{.seed = 5, .errors_per_mille = 20}, options.wake);
        return opened;
      };
    }
    EngineEnvironment environment;
    environment.communicator = world;
    environment.test_hooks = hooks;
    try {
      Engine engine(plain_config(directory.path(), Tier::nvme, Timing::just_in_time), environment);
      // Nothing but experts: the groups meet at the end of backward alone.
      auto model = testing::small_model(4);
      const auto group = world->split(rank / 2);
      for (SyntheticUnit& unit : model) unit.options.communicator = group;
      testing::SyntheticTrainer trainer(engine, model, {});
      engine.commit();
      trainer.initialize();
      for (int step = 0; step < 200; ++step) trainer.step();
    } catch (const Error& error) {
      texts[static_cast<std::size_t>(rank)] = error.what();
    }
  });
  EXPECT_THAT(texts[3], HasSubstr("failed"));
  for (std::size_t rank : {0u, 1u, 2u}) EXPECT_THAT(texts[rank], HasSubstr("rank "));
  EXPECT_THAT(texts[2], HasSubstr("rank 3"));
}

TEST(UnitCommunicatorsFailureTest, ARankThatStandsStillEndsAllGroupsInTime) {
  const Watchdog watchdog(60);
  const TemporaryDirectory directory;
  const auto worlds = make_in_process_communicators(kRanks, {.timeout = std::chrono::seconds(5)});
  std::vector<std::string> texts(kRanks);
  std::atomic<int> ended{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto& world = worlds[static_cast<std::size_t>(rank)];
      EngineEnvironment environment;
      environment.communicator = world;
      try {
        Engine engine(plain_config(directory.path(), Tier::host, Timing::just_in_time), environment);
        auto model = testing::small_model(4);
        model[2].options.communicator = world->split(rank / 2);
        testing::SyntheticTrainer trainer(engine, model, {});
        engine.commit();
        trainer.initialize();
        trainer.step();
        while (rank == 3 && ended < 3) std::this_thread::sleep_for(std::chrono::milliseconds(10));
        for (int step = 0; step < 100; ++step) trainer.step();
      } catch (const CommunicationError& error) {
        texts[static_cast<std::size_t>(rank)] = error.what();
      }
      ++ended;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& text : texts) EXPECT_THAT(text, HasSubstr("rank "));
  EXPECT_THAT(texts[0], HasSubstr("rank 3"));
}

// What each rank's commit (or add_unit) says.
std::vector<std::string> refusals(
    const std::function<void(Engine&, int rank, const std::shared_ptr<Communicator>&)>& add_units) {
  const TemporaryDirectory directory;
  std::vector<std::string> texts(kRanks);
  on_ranks(kRanks, [&](int rank, const std::shared_ptr<Communicator>& world) {
    EngineEnvironment environment;
    environment.communicator = world;
    Engine engine(plain_config(directory.path(), Tier::host, Timing::just_in_time), environment);
    try {
      add_units(engine, rank, world);
      engine.commit();
    } catch (const Error& error) {
      texts[static_cast<std::size_t>(rank)] = error.what();
    }
  });
  return texts;
}

TEST(UnitCommunicatorsFailureTest, WhatDoesNotAgreeIsRefusedOnAllRanks) {
  const Watchdog watchdog(100);
  const auto expect_all = [](const std::vector<std::string>& texts, const std::string& part) {
    for (const std::string& text : texts) EXPECT_THAT(text, HasSubstr(part));
  };
  // Shapes that differ between groups.
  expect_all(refusals([](Engine& engine, int rank, const auto& world) {
               engine.add_unit("expert", {{"w", {rank < 2 ? 10 : 11}}}, {world->split(rank / 2), {}});
             }),
             "rank 2 differs in unit 0, with a communicator of its own");
  // Groups of different sizes.
  expect_all(refusals([](Engine& engine, int rank, const auto& world) {
               engine.add_unit("expert", {{"w", {10}}}, {world->split(rank == 3), {}});
             }),
             "of 3 ranks");
  // One rank names none.
  expect_all(refusals([](Engine& engine, int rank, const auto& world) {
               const auto group = world->split(rank / 2);
               engine.add_unit("expert", {{"w", {10}}}, {rank == 1 ? nullptr : group, {}});
             }),
             "rank 1 differs in value");
  expect_all(refusals([](Engine& engine, int rank, const auto& world) {
               engine.add_unit("expert", {{"w", {10}}}, {world->split(rank / 2), rank == 0 ? 4.0 : 2.0});
             }),
             "gradient_divisor");
  // Names that differ within a group.
  const std::vector<std::string> texts = refusals([](Engine& engine, int rank, const auto& world) {
    engine.add_unit("expert", {{rank == 3 ? "v" : "w", {10}}}, {world->split(rank / 2), {}});
  });
  expect_all(texts, "unit expert");
  EXPECT_THAT(texts[0], HasSubstr("gave up"));
}

TEST(UnitCommunicatorsFailureTest, ACommunicatorOfOtherRanksIsRefused) {
  const Watchdog watchdog(100);
  const TemporaryDirectory directory;
  // Two engines of two ranks each: a unit over a pair with one rank of either.
  std::vector<std::string> texts(kRanks);
  on_ranks(kRanks, [&](int rank, const std::shared_ptr<Communicator>& all) {
    EngineEnvironment environment;
    environment.communicator = all->split(rank / 2);
    Engine engine(plain_config(directory.path(), Tier::host, Timing::just_in_time), environment);
    EXPECT_THROW(engine.add_unit("u", {{"w", {10}}}, {all, {}}), UsageError);
    for (double divisor : {0.0, -1.0, std::nan("")})
      EXPECT_THROW(engine.add_unit("u", {{"w", {10}}}, {nullptr, divisor}), UsageError);
    engine.add_unit("u", {{"w", {10}}}, {all->split(rank % 2), {}});
    try {
      engine.commit();
    } catch (const UsageError& error) {
      texts[static_cast<std::size_t>(rank)] = error.what();
    }
  });
  for (const std::string& text : texts) EXPECT_THAT(text, HasSubstr("another engine's world"));
  EngineEnvironment environment;
  Engine engine(plain_config(directory.path(), Tier::host, Timing::just_in_time), environment);
  const auto two = make_in_process_communicators(2);
  EXPECT_THROW(engine.add_unit("u", {{"w", {10}}}, {two[0], {}}), UsageError);
}

}  // namespace
}  // namespace ballast
