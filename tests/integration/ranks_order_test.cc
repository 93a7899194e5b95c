// Ranks that were given different things, or whose trainers do different things: every one of them ends with words that
// say what, in time, and no number is computed from another unit's bytes.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "support/durable_runs.h"
#include "support/on_ranks.h"

namespace ballast::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr auto kPatient = std::chrono::seconds(60);  // longer than any of these tests
constexpr auto kShort = std::chrono::seconds(2);

// Runs `work` on every rank, and returns what each has thrown; all communicators live until all have ended.
std::vector<std::string> texts_of(int world_size, std::chrono::milliseconds timeout,
                                  const std::function<void(int, const std::shared_ptr<Communicator>&)>& work) {
  const auto communicators = make_in_process_communicators(world_size, {.timeout = timeout});
  std::vector<std::string> texts(static_cast<std::size_t>(world_size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      const auto own = static_cast<std::size_t>(rank);
      try {
        work(rank, communicators[own]);
      } catch (const Error& error) {
        texts[own] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return texts;
}

class RanksOrder : public ::testing::Test {
 protected:
  Config config(int stage = 3) const {
    Config made = plain_config(directory_.path() + "/run", stage == 3 ? Tier::nvme : Tier::host, Timing::just_in_time);
    made.zero_stage = stage;
    return made;
  }
  const Watchdog watchdog_{150};
  const TemporaryDirectory directory_;
  const std::string path_ = directory_.path();
};

TEST_F(RanksOrder, WhatRanksWereGivenDifferentlyIsNamedAtTheStart) {
  struct Given {
    std::vector<ParameterSpec> a = {{"w", {1000}}}, b = {{"w", {500}}};
    bool b_first = false;
    int window = 1;  // openings of b that are open beside a
    Config config;
  };
  const auto refusals = [&](const std::function<void(Given&)>& change) {
    return texts_of(2, kPatient, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
      Given given;
      given.config = config();
      if (rank == 1) change(given);
      Engine engine(given.config, {.communicator = communicator});
      if (given.b_first) engine.add_unit("b", given.b);
      const UnitId a = engine.add_unit("a", given.a);
      if (!given.b_first) engine.add_unit("b", given.b);
      engine.expect_order({{a, true, true, given.window}, {a, true, false}, {a, true, false}});
      engine.commit();
    });
  };
  EXPECT_THAT(refusals([](Given& g) {
                g.a = {{"w", {1001}}};
              }),
              Each(AllOf(HasSubstr("rank 1 differs in unit a"), HasSubstr("1001"), HasSubstr("1000"))));
  EXPECT_THAT(refusals([](Given& g) {
                g.b = {{"w", {500}, {.dtype = DataType::fp32}}};
              }),
              Each(AllOf(HasSubstr("rank 1 differs in unit b"), HasSubstr("fp32"))));
  EXPECT_THAT(refusals([](Given& g) { g.a = {{"w", {1000}, {.group = 1}}}; }), Each(HasSubstr("differs in unit a")));
  EXPECT_THAT(refusals([](Given& g) { g.b_first = true; }),
              Each(AllOf(HasSubstr("\"unit b\" there"), HasSubstr("\"unit a\" here"))));
  EXPECT_THAT(refusals([](Given& g) { g.window = 2; }), Each(HasSubstr("differs in expected order")));
  EXPECT_THAT(refusals([](Given& g) { g.config.optimizer.beta1 = 0.8; }),
              Each(AllOf(HasSubstr("differs in configuration key optimizer"), HasSubstr("0.8"))));
  EXPECT_THAT(refusals([](Given&) {}), Each(""));
}

// Units of one size, so that no size tells them apart.
struct Trainer {
  Trainer(const Config& config, const std::shared_ptr<Communicator>& communicator)
      : engine(config, {.communicator = communicator}) {
    for (const char* name : {"a", "b", "c"}) ids.push_back(engine.add_unit(name, parameters));
    engine.commit();
    engine.initialize([](ParameterId id, std::int64_t, std::span<float> values) {
      std::fill(values.begin(), values.end(), static_cast<float>(id.unit + 1));
    });
  }
  // Reads what it has acquired at once where it waits.
  void forward(std::size_t unit, bool waits) {
    auto lease = engine.acquire(ids[unit], engine.stream());
    if (!waits) return;
    lease.wait();
    EXPECT_EQ(bf16_value(*static_cast<const std::uint16_t*>(lease[{ids[unit].index, 0}].data)),
              1.0F + static_cast<float>(unit));
  }
  void step(const std::vector<std::size_t>& forward_order, const std::vector<std::size_t>& backward_order, bool waits,
            const StepOptions& options = {}) {
    auto step = engine.begin_step(options);
    {
      auto pass = step.begin_pass();
      for (const std::size_t unit : forward_order) forward(unit, waits);
      for (const std::size_t unit : backward_order) {
        contribute(engine, ids[unit], parameters, [](std::uint32_t) { return 0.0F; });
      }
    }
    step.finish_backward();
    step.update();
  }
  std::vector<ParameterSpec> parameters = {{"w", {64, 64}}};
  Engine engine;
  std::vector<UnitId> ids;
};

TEST_F(RanksOrder, TrainersThatAskForOtherThingsEndTogetherWithTheFirstDifference) {
  struct Course {
    std::string said;
    std::vector<std::size_t> forward = {0, 1, 2}, backward = {2, 1, 0};
    StepOptions options = {};
  };
  const std::vector<Course> courses = {
      {"\"acquire unit b\" there, \"acquire unit a\" here", {1, 0, 2}},
      {"\"acquire unit b\" there, \"acquire unit c\" here", {0, 1, 1, 2}},
      {"\"acquire unit c\" there, \"acquire unit b\" here", {0, 2}},
      {"\"acquire unit a\" there, \"acquire unit b\" here", {0, 1, 2}, {2, 0}},
      {"\"finish backward\" there, \"acquire unit a\" here", {0, 1, 2}, {2, 1}},
      {"options of the step", {0, 1, 2}, {2, 1, 0}, {.learning_rate = 0.5}},
  };
  for (const int stage : {0, 1, 3}) {
    for (const Course& course : courses) {
      SCOPED_TRACE("stage " + std::to_string(stage) + ": " + course.said);
      const auto begin = std::chrono::steady_clock::now();
      const auto texts = texts_of(2, kPatient, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
        Trainer trainer(config(stage), communicator);
        for (int s = 0; s < 2; ++s) trainer.step({0, 1, 2}, {2, 1, 0}, true);
        const Course mine = rank == 1 ? course : Course{};
        trainer.step(mine.forward, mine.backward, false, mine.options);
        ADD_FAILURE() << "rank " << rank << " has not noticed";
      });
      // Where gathers have met first, their own words.
      const auto by_calls = AllOf(HasSubstr("every rank must make the same calls"), HasSubstr(course.said));
      const auto by_gather = AllOf(HasSubstr("ranks are at odds"), HasSubstr("for unit "));
      EXPECT_THAT(texts, Each(AnyOf(by_calls, by_gather)));
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
    }
  }
}

// A host that waits for what it has acquired meets the other's unit before any end of backward.
TEST_F(RanksOrder, GathersOfDifferentUnitsNeverPairUp) {
  const auto texts = texts_of(2, kShort, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
    Trainer trainer(config(), communicator);
    trainer.step({0, 1, 2}, {2, 1, 0}, true);
    const std::vector<std::size_t> order =
        rank == 0 ? std::vector<std::size_t>{1, 2, 0} : std::vector<std::size_t>{2, 1, 0};
    for (int s = 0; s < 3; ++s) {
      auto pass = trainer.engine.begin_pass({.kind = Pass::evaluate, .key = static_cast<std::uint64_t>(s)});
      for (const std::size_t unit : order) trainer.forward(unit, true);
    }
    ADD_FAILURE() << "rank " << rank << " has not noticed";
  });
  EXPECT_THAT(texts, Each(AnyOf(AllOf(HasSubstr("for unit 1"), HasSubstr("for unit 2")), HasSubstr("gave up"))));
}

TEST_F(RanksOrder, OneRankAloneMayEvaluateWhereEachHoldsEverything) {
  const auto texts = texts_of(2, kPatient, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
    Config whole = config(0);
    whole.optimizer.timing = Timing::after_backward;
    Trainer trainer(whole, communicator);
    for (int s = 0; s < 3; ++s) {
      trainer.step({0, 1, 2}, {2, 1, 0}, false);
      if (rank == 1) continue;
      auto pass = trainer.engine.begin_pass({.kind = Pass::evaluate});
      for (const std::size_t unit : {2U, 0U}) trainer.engine.acquire(trainer.ids[unit], trainer.engine.stream()).wait();
    }
  });
  EXPECT_THAT(texts, Each(""));
}

TEST_F(RanksOrder, ASaveOrALoadByOneRankAloneIsToldThatEveryRankMakesIt) {
  for (const bool durable : {false, true}) {
    for (const bool other_trains_on : {false, true}) {
      SCOPED_TRACE(std::string(durable ? "durable" : "plain") + (other_trains_on ? ", the other trains on" : ""));
      Config made = config();
      made.durability.every_steps = durable ? 1 : 0;
      made.nvme.paths = {path_ + (durable ? "/durable" : "/plain") + (other_trains_on ? "-on" : "")};
      std::atomic<bool> over{false};
      const auto texts = texts_of(2, kShort, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
        Trainer trainer(made, communicator);
        trainer.step({0, 1, 2}, {2, 1, 0}, true);
        if (rank == 0) {
          const std::string text =
              text_of<CommunicationError>([&] { trainer.engine.save_checkpoint(path_ + "/saves/step-1"); });
          over = true;
          throw CommunicationError(text);
        }
        for (int s = 0; s < 2 && other_trains_on; ++s) trainer.step({0, 1, 2}, {2, 1, 0}, false);
        while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      });
      EXPECT_THAT(texts[0], AllOf(HasSubstr("save_checkpoint, which every rank calls"), HasSubstr("rank 1")));
      if (other_trains_on) {
        EXPECT_THAT(texts[1], HasSubstr("rank "));
      }
      EXPECT_FALSE(std::filesystem::exists(path_ + "/saves/step-1"));
    }
  }
  // A load is a commit.
  const auto texts = texts_of(2, kShort, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
    Engine engine(config(), {.communicator = communicator});
    engine.add_unit("a", {{"w", {64}}});
    if (rank == 0) engine.commit({ExistingRun::resume, path_ + "/saves"});
    std::this_thread::sleep_for(kShort + std::chrono::seconds(1));
  });
  EXPECT_THAT(texts[0], AllOf(HasSubstr("commit, which every rank calls"), HasSubstr("rank 1 did not come")));
}

TEST_F(RanksOrder, EightRanksSaveAtOnceIntoFoldersThatAreNotThereYet) {
  const std::vector<SyntheticUnit> model = {{"u", {{"w", {300}}}}};
  on_ranks(8, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
    Engine engine(plain_config(path_ + "/deep/run", Tier::host, Timing::just_in_time), {.communicator = communicator});
    SyntheticTrainer trainer(engine, model);
    engine.commit();
    trainer.initialize();
    trainer.step();
    for (int round = 0; round < 50; ++round) {
      const std::string folder = path_ + "/a/" + std::to_string(round % 25) + "/b/c/step-1";
      // The second time there is one already, and beside it what an interrupted save has left.
      if (rank == 0 && round >= 25) {
        std::filesystem::create_directories(folder + ".new/ballast-rank3");
        std::ofstream(folder + ".new/ballast-rank9.chunks") << "half";
      }
      communicator->barrier();
      engine.save_checkpoint(folder);
    }
  });
  for (int place = 0; place < 25; ++place) {
    const std::string folder = path_ + "/a/" + std::to_string(place) + "/b/c/step-1";
    EXPECT_FALSE(std::filesystem::exists(folder + ".new"));
    const auto files =
        std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator());
    EXPECT_EQ(files, 16) << "a chunk file and a manifest for each rank";
  }
}

}  // namespace
}  // namespace ballast::testing
