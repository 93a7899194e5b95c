// The scheduler by hand: one scenario at a time, with the world's answers given in the order that the test wants.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/schedule/scheduler.h>
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

namespace ballast::schedule {
namespace {

// Tasks as text ("read 0", "copy in 1"), to compare whole sequences.
std::string name(const Action& action) {
  static const char* const kNames[] = {"read", "write", "copy in", "copy out", "update", "accumulate"};
  return std::string(kNames[static_cast<int>(action.task)]) + ' ' + std::to_string(action.chunk);
}

using Names = std::vector<std::string>;

class World {
 public:
  // Units of equal shape.
  World(Index units, Index chunks, Limits limits = {}, Tier parameters = Tier::nvme, Tier optimizer = Tier::nvme,
        Tier gradients = Tier::host, bool stored = true) {
    std::vector<Chunk> all;
    std::vector<Unit> list;
    for (Index u = 0; u < units; ++u) {
      Unit unit;
      unit.first_chunk = u * chunks;
      unit.chunk_count = chunks;
      unit.parameter_bytes = parameters == Tier::device ? 0 : 10;
      unit.gradient_bytes = 10;
      unit.stored_gradients = stored;
      list.push_back(unit);
      for (Index c = 0; c < chunks; ++c) {
        Chunk chunk;
        chunk.unit = u;
        chunk.parameters = parameters;
        chunk.optimizer = optimizer;
        chunk.gradients = gradients;
        all.push_back(chunk);
      }
    }
    scheduler = std::make_unique<Scheduler>(all, list, limits);
    chunks_ = chunks;
  }

  // Starts what may start, and says what that is.
  Names start() {
    std::array<Action, 32> actions;
    const std::size_t count = scheduler->next(actions);
    Names names;
    for (std::size_t i = 0; i < count; ++i) {
      names.push_back(name(actions[i]));
      flying.push_back(actions[i]);
    }
    verify();
    return names;
  }
  void finish(const std::string& which) {
    for (std::size_t i = 0; i < flying.size(); ++i) {
      if (name(flying[i]) != which) continue;
      const Action action = flying[i];
      flying.erase(flying.begin() + static_cast<std::ptrdiff_t>(i));
      scheduler->finished(action);
      verify();
      return;
    }
    ADD_FAILURE() << which << " is not in flight\n" << scheduler->describe();
  }
  const Action& flight(const std::string& which) {
    for (const Action& action : flying) {
      if (name(action) == which) return action;
    }
    ADD_FAILURE() << which << " is not in flight";
    return flying.front();
  }
  // Until nothing is in flight; every task that began, in order.
  Names run() {
    Names all = start();
    while (!flying.empty()) {
      finish(name(flying.front()));
      for (std::string& n : start()) all.push_back(std::move(n));
    }
    return all;
  }
  void commit(Index entry, bool last, bool eager, std::vector<int> contributes = {}) {
    std::array<bool, 8> flags;
    for (Index i = 0; i < chunks_; ++i) flags[i] = contributes.empty() || contributes[i] != 0;
    scheduler->commit_gradients(entry, {flags.data(), chunks_}, last, eager);
    if (eager && last) {
      EXPECT_TRUE(scheduler->append_eager_updates(units_[entry]));
    }
    verify();
  }
  // Gradients of a unit, from opening to the last byte accumulated.
  void contribute(Index unit, bool last, bool eager = false, std::vector<int> contributes = {}) {
    const Index g = scheduler->append_gradients(unit, 100 + 10 * unit, false, true);
    units_[g] = unit;
    commit(g, last, eager, contributes);
    run();
  }
  Index gradients(Index unit, std::uint64_t offset, bool eager_updates, bool leased) {
    const Index g = scheduler->append_gradients(unit, offset, eager_updates, leased);
    units_[g] = unit;
    verify();
    return g;
  }
  Index parameters(Index unit, std::uint64_t offset, Form form, bool leased) {
    const Index p = scheduler->append_parameters(unit, offset, form, leased);
    verify();
    return p;
  }
  void release(Index entry) {
    scheduler->release(entry);
    verify();
  }
  void verify() {
    const std::string broken = scheduler->check();
    EXPECT_EQ(broken, "") << scheduler->describe();
  }

  std::unique_ptr<Scheduler> scheduler;
  std::vector<Action> flying;

 private:
  Index chunks_ = 1;
  std::array<Index, 128> units_{};
};

Limits small(Index fetch, Index update, Index gradient) {
  Limits l;
  l.fetch_slots = fetch;
  l.update_slots = update;
  l.gradient_slots = gradient;
  return l;
}

// --- fetching --------------------------------------------------------------------------------------------------------

TEST(Scheduler, BringsParametersFromNvmeThroughASlotToTheDevice) {
  World w(1, 2, small(1, 1, 1));
  const Index p = w.parameters(0, 0, Form::fetch, true);
  EXPECT_EQ(w.start(), (Names{"read 0"}));  // one slot
  EXPECT_FALSE(w.scheduler->ready(p));
  w.finish("read 0");
  EXPECT_EQ(w.start(), (Names{"copy in 0"}));
  w.finish("copy in 0");
  EXPECT_EQ(w.run(), (Names{"read 1", "copy in 1"}));
  EXPECT_TRUE(w.scheduler->ready(p));
  w.release(p);
  EXPECT_TRUE(w.scheduler->idle());
  EXPECT_EQ(w.scheduler->entries_alive(), 0u);
}

TEST(Scheduler, CopiesParametersInHostMemoryWithoutASlot) {
  World w(1, 1, small(1, 1, 1), Tier::host, Tier::host);
  const Index p = w.parameters(0, 0, Form::fetch, true);
  EXPECT_EQ(w.start(), (Names{"copy in 0"}));
  EXPECT_EQ(w.flight("copy in 0").slot, kNone);
  w.run();
  EXPECT_TRUE(w.scheduler->ready(p));
}

TEST(Scheduler, FindsParametersOnTheDeviceReadyAtOnce) {
  World w(1, 2, small(1, 1, 1), Tier::device, Tier::device, Tier::device);
  EXPECT_TRUE(w.scheduler->ready(w.parameters(0, 0, Form::fetch, true)));
  EXPECT_EQ(w.start(), Names{});
}

TEST(Scheduler, ReadsAheadButWritesOverMemoryOnlyOnceItsUsersAreGone) {
  World w(2, 1);
  const Index a = w.parameters(0, 0, Form::fetch, true);
  w.run();
  const Index b = w.parameters(1, 5, Form::fetch, false);  // overlaps
  EXPECT_EQ(w.run(), (Names{"read 1"}));
  w.release(a);
  EXPECT_EQ(w.run(), (Names{"copy in 1"}));
  w.scheduler->lease(b);
  EXPECT_TRUE(w.scheduler->ready(b));
}

TEST(Scheduler, UsesParametersAgainThatAreStillOnTheDevice) {
  World w(2, 1);
  const Index a = w.parameters(0, 0, Form::fetch, true);
  w.run();
  const Index again = w.parameters(0, 0, Form::fetch, false);  // while the first use is alive
  EXPECT_EQ(w.start(), Names{});
  w.release(a);
  w.scheduler->lease(again);
  EXPECT_TRUE(w.scheduler->ready(again));
  w.release(again);
  const Index third = w.parameters(0, 0, Form::fetch, true);  // and after both
  EXPECT_EQ(w.start(), Names{});
  EXPECT_TRUE(w.scheduler->ready(third));
  w.release(third);
  const Index elsewhere = w.parameters(0, 20, Form::fetch, true);
  EXPECT_EQ(w.run(), (Names{"read 0", "copy in 0"}));
  w.release(elsewhere);
}

TEST(Scheduler, ForgetsACopyThatSomethingIsWrittenOver) {
  World w(2, 1);
  w.release(w.parameters(0, 0, Form::fetch, true));
  w.run();
  w.release(w.parameters(1, 9, Form::fetch, true));
  w.run();
  w.parameters(0, 0, Form::fetch, true);
  EXPECT_EQ(w.run(), (Names{"read 0", "copy in 0"}));
}

TEST(Scheduler, ForgetsACopyWhoseParametersAreUpdated) {
  World w(1, 1);
  w.release(w.parameters(0, 0, Form::fetch, true));
  w.run();
  w.contribute(0, true);
  w.scheduler->decide(true);
  EXPECT_TRUE(w.scheduler->append_updates(0));
  w.run();
  w.parameters(0, 0, Form::fetch, true);
  EXPECT_EQ(w.run(), (Names{"read 0", "copy in 0"}));
}

TEST(Scheduler, EndsAUseThatWasReleasedBeforeItsSourceArrived) {
  World w(1, 1);
  const Index a = w.parameters(0, 0, Form::fetch, true);
  const Index b = w.parameters(0, 0, Form::fetch, true);
  w.release(b);
  w.release(a);
  EXPECT_EQ(w.scheduler->entries_alive(), 2u);
  w.run();
  EXPECT_EQ(w.scheduler->entries_alive(), 0u);
}

TEST(Scheduler, EndsAReleasedUseWhenItsSourceArrivesThoughThatOneStays) {
  World w(1, 1);
  w.parameters(0, 0, Form::fetch, true);
  const Index b = w.parameters(0, 0, Form::fetch, true);
  w.release(b);
  w.run();
  EXPECT_FALSE(w.scheduler->entry_alive(b));
  EXPECT_EQ(w.scheduler->entries_alive(), 1u);
}

TEST(Scheduler, SaysWhereACurrentCopyLiesAndThatOneIsOutdated) {
  World w(1, 1);
  std::uint64_t offset = 0;
  EXPECT_FALSE(w.scheduler->copy_offset(0, &offset));
  w.release(w.parameters(0, 30, Form::fetch, true));
  w.run();
  EXPECT_TRUE(w.scheduler->copy_offset(0, &offset));
  EXPECT_EQ(offset, 30u);
  w.contribute(0, true);
  w.scheduler->decide(true);
  EXPECT_FALSE(w.scheduler->copy_offset(0, &offset));
}

TEST(Scheduler, GivesSlotsOutInProgramOrder) {
  World w(3, 1, small(1, 1, 1));
  w.parameters(0, 0, Form::fetch, false);
  w.parameters(1, 10, Form::fetch, false);
  w.parameters(2, 20, Form::fetch, false);
  EXPECT_EQ(w.run(), (Names{"read 0", "copy in 0", "read 1", "copy in 1", "read 2", "copy in 2"}));
}

TEST(Scheduler, KeepsEachLaneWithinItsDepth) {
  Limits l = small(8, 8, 8);
  l.reads = 3;
  l.copies_in = 1;
  World w(1, 6, l);
  w.parameters(0, 0, Form::fetch, true);
  EXPECT_EQ(w.start(), (Names{"read 0", "read 1", "read 2"}));
  w.finish("read 1");
  w.finish("read 0");
  EXPECT_EQ(w.start(), (Names{"read 3", "read 4", "copy in 0"}));
}

// --- just in time ----------------------------------------------------------------------------------------------------

TEST(Scheduler, ReadsStatesAheadOfTheDecisionAndUpdatesAfterIt) {
  World w(1, 1);
  const Index now = w.parameters(0, 0, Form::fetch, true);
  w.run();
  const Index g = w.gradients(0, 100, false, true);
  const Index next = w.parameters(0, 0, Form::update_expected, false);
  w.commit(g, true, false);
  w.release(now);
  EXPECT_EQ(w.run(), (Names{"read 0", "copy out 0", "accumulate 0"}));  // the gradient does not wait, nor the read
  w.scheduler->decide(true);
  EXPECT_TRUE(w.scheduler->update_due(0));
  w.scheduler->lease(next);
  EXPECT_EQ(w.run(), (Names{"update 0", "write 0", "copy in 0"}));
  EXPECT_TRUE(w.scheduler->ready(next));
  EXPECT_FALSE(w.scheduler->update_due(0));
  EXPECT_EQ(w.scheduler->updates_done(0), 1u);
}

TEST(Scheduler, KeepsAReadForADiscardedUpdateAsTheFetch) {
  World w(1, 1);
  const Index next = w.parameters(0, 0, Form::update_expected, false);
  EXPECT_EQ(w.run(), (Names{"read 0"}));
  w.scheduler->decide(false);
  EXPECT_EQ(w.run(), (Names{"copy in 0"}));
  w.scheduler->lease(next);
  EXPECT_TRUE(w.scheduler->ready(next));
  EXPECT_EQ(w.scheduler->updates_done(0), 0u);
}

TEST(Scheduler, FetchesWhereTheGradientWasAbsent) {
  World w(1, 2);
  w.contribute(0, true, false, {1, 0});
  const Index next = w.parameters(0, 0, Form::update_expected, false);
  w.run();
  w.scheduler->decide(true);
  w.run();
  w.scheduler->lease(next);
  EXPECT_TRUE(w.scheduler->ready(next));
  EXPECT_EQ(w.scheduler->updates_done(0), 1u);
  EXPECT_EQ(w.scheduler->updates_done(1), 0u);
}

TEST(Scheduler, UpdatesWhatIsDueWhenItsParametersAreAskedFor) {
  for (const Form form : {Form::fetch, Form::update_expected, Form::update_after}) {
    World w(1, 1);
    w.contribute(0, true);
    w.scheduler->decide(true);
    const Index p = w.parameters(0, 0, form, true);
    EXPECT_EQ(w.run().front(), "read 0");
    EXPECT_TRUE(w.scheduler->ready(p));
    EXPECT_EQ(w.scheduler->updates_done(0), 1u);
  }
}

TEST(Scheduler, LetsALaterUseWaitForTheWriteBackOfTheUpdateBeforeIt) {
  World w(1, 1);
  w.contribute(0, true);
  w.scheduler->decide(true);
  const Index a = w.parameters(0, 0, Form::fetch, true);
  const Index b = w.parameters(0, 20, Form::fetch, true);  // elsewhere: no copy to use
  EXPECT_EQ(w.start(), (Names{"read 0"}));
  w.finish("read 0");
  w.start();
  w.finish("update 0");
  EXPECT_EQ(w.start(), (Names{"write 0", "copy in 0"}));
  w.finish("copy in 0");
  EXPECT_TRUE(w.scheduler->ready(a));
  EXPECT_EQ(w.start(), Names{});
  EXPECT_TRUE(w.flight("write 0").urgent);  // somebody waits behind it
  w.finish("write 0");
  EXPECT_EQ(w.run(), (Names{"read 0", "copy in 0"}));
  EXPECT_TRUE(w.scheduler->ready(b));
}

TEST(Scheduler, RunsADueUpdateOnceThoughTheNextOneIsCancelled) {
  World w(1, 1);
  w.contribute(0, true);
  w.scheduler->decide(true);
  const Index a = w.parameters(0, 0, Form::fetch, true);  // claims what is due
  w.parameters(0, 20, Form::update_expected, false);      // the next step's
  w.scheduler->cancel_expected();
  w.verify();
  const Index b = w.parameters(0, 40, Form::fetch, true);
  w.run();
  EXPECT_TRUE(w.scheduler->ready(a));
  EXPECT_TRUE(w.scheduler->ready(b));
  EXPECT_EQ(w.scheduler->updates_done(0), 1u);
}

TEST(Scheduler, TakesAnUndecidedUpdateBackWhereTheTrainerReadsFirst) {
  World w(1, 1, small(1, 1, 1));
  const Index p = w.parameters(0, 0, Form::update_expected, false);
  w.run();
  w.scheduler->lease(p);  // before any decision
  w.run();
  EXPECT_TRUE(w.scheduler->ready(p));
}

TEST(Scheduler, DropsExpectedFetchesOfAUnitThatBecomesDue) {
  World w(1, 1);
  w.contribute(0, true);
  const Index stale = w.parameters(0, 0, Form::fetch, false);
  w.run();
  const std::uint64_t before = w.scheduler->cancellations();
  w.scheduler->decide(true);
  w.verify();
  EXPECT_GT(w.scheduler->cancellations(), before);
  EXPECT_FALSE(w.scheduler->expected(stale));
  const Index p = w.parameters(0, 0, Form::fetch, true);
  EXPECT_EQ(w.run(), (Names{"read 0", "update 0", "write 0", "copy in 0"}));
  EXPECT_TRUE(w.scheduler->ready(p));
}

// --- after backward --------------------------------------------------------------------------------------------------

TEST(Scheduler, UpdatesEverythingAfterTheDecision) {
  World w(3, 1, small(1, 1, 1));
  for (Index u = 0; u < 3; ++u) w.contribute(u, true);
  w.scheduler->decide(true);
  for (Index u = 0; u < 3; ++u) EXPECT_TRUE(w.scheduler->append_updates(u));
  for (Index u = 0; u < 3; ++u) EXPECT_TRUE(w.scheduler->append_updates(u));  // nothing more to queue
  w.run();
  EXPECT_TRUE(w.scheduler->idle());
  for (Index c = 0; c < 3; ++c) EXPECT_EQ(w.scheduler->updates_done(c), 1u);
}

TEST(Scheduler, DropsDiscardedGradients) {
  World w(1, 1);
  w.contribute(0, true);
  w.scheduler->decide(false);
  EXPECT_FALSE(w.scheduler->unit_update_due(0));
  EXPECT_TRUE(w.scheduler->append_updates(0));
  EXPECT_TRUE(w.scheduler->idle());
}

// --- eager -----------------------------------------------------------------------------------------------------------

TEST(Scheduler, ReadsStatesWithTheParametersAndUpdatesWhenTheGradientHasCome) {
  World w(1, 1);
  const Index p = w.parameters(0, 0, Form::update_after, true);
  EXPECT_EQ(w.run(), (Names{"read 0", "copy in 0"}));
  EXPECT_TRUE(w.scheduler->ready(p));
  const Index g = w.gradients(0, 100, false, true);
  w.commit(g, true, true);
  EXPECT_TRUE(w.scheduler->unit_update_due(0));
  EXPECT_EQ(w.run(), (Names{"copy out 0", "accumulate 0", "update 0", "write 0"}));
  EXPECT_EQ(w.scheduler->updates_done(0), 1u);
  w.release(p);
  w.scheduler->decide(true);
  EXPECT_FALSE(w.scheduler->unit_update_due(0));
  EXPECT_TRUE(w.scheduler->idle());
}

TEST(Scheduler, CopiesParametersInBeforeAnEagerUpdateChangesThem) {
  World w(2, 1);
  const Index before = w.parameters(1, 5, Form::fetch, true);  // still in the way
  const Index p = w.parameters(0, 0, Form::update_after, true);
  const Index g = w.gradients(0, 100, false, true);
  w.run();
  w.commit(g, true, true);  // though the trainer never looked at the parameters
  EXPECT_EQ(w.run(), (Names{"copy out 0", "accumulate 0"}));
  w.release(before);
  EXPECT_EQ(w.run(), (Names{"copy in 0", "update 0", "write 0"}));
  EXPECT_TRUE(w.scheduler->ready(p));
}

TEST(Scheduler, TellsWhetherADueUpdateNeedsAnythingMore) {
  World w(1, 1);
  EXPECT_TRUE(w.scheduler->unit_updates_coming(0));  // none is due
  w.contribute(0, true);
  w.scheduler->decide(true);
  EXPECT_FALSE(w.scheduler->unit_updates_coming(0));  // nothing asks for it
  const Index p = w.parameters(0, 0, Form::fetch, false);
  EXPECT_FALSE(w.scheduler->unit_updates_coming(0));  // an expected entry may be cancelled
  w.scheduler->lease(p);
  EXPECT_TRUE(w.scheduler->unit_updates_coming(0));
  w.run();
  EXPECT_TRUE(w.scheduler->unit_updates_coming(0));
  w.release(p);
  w.contribute(0, true);
  w.scheduler->decide(true);
  EXPECT_TRUE(w.scheduler->append_updates(0));
  EXPECT_TRUE(w.scheduler->unit_updates_coming(0));
}

TEST(Scheduler, QueuesEagerUpdatesWithTheGradientOpening) {
  World w(1, 2, small(1, 1, 1));
  const Index p = w.parameters(0, 0, Form::fetch, true);
  const Index g = w.gradients(0, 100, true, true);
  w.run();
  EXPECT_TRUE(w.scheduler->ready(p));
  w.commit(g, true, true);
  w.run();
  EXPECT_EQ(w.scheduler->updates_done(0), 1u);
  EXPECT_EQ(w.scheduler->updates_done(1), 1u);
}

TEST(Scheduler, DoesNotUpdateTwiceThoughTheNextUpdateIsQueuedWhileTheGradientIsHere) {
  World w(1, 1);
  const Index p = w.parameters(0, 0, Form::update_after, true);
  w.run();
  const Index g = w.gradients(0, 100, false, true);
  w.commit(g, true, true);
  for (const char* task : {"copy out 0", "accumulate 0"}) {
    w.start();
    w.finish(task);
  }
  w.release(p);
  w.start();  // the update runs
  w.parameters(0, 20, Form::update_after, false);
  w.run();
  EXPECT_EQ(w.scheduler->updates_done(0), 1u);
}

TEST(Scheduler, QueuesAnEagerUpdateThoughItsGradientIsHereAlready) {
  World w(1, 1);
  const Index g = w.scheduler->append_gradients(0, 100, false, true);
  const bool contributes[] = {true};
  w.scheduler->commit_gradients(g, contributes, true, true);
  w.run();  // accumulated, and nothing to update it yet
  EXPECT_TRUE(w.scheduler->append_eager_updates(0));
  EXPECT_TRUE(w.scheduler->append_eager_updates(0));  // once is enough
  w.run();
  EXPECT_EQ(w.scheduler->updates_done(0), 1u);
  w.scheduler->decide(true);
  w.verify();
}

TEST(Scheduler, HoldsAGradientThatIsConsumedAtOnceUntilItsUpdate) {
  World w(2, 1, small(1, 1, 1), Tier::nvme, Tier::nvme, Tier::host, false);
  for (Index u = 2; u-- > 0;) {
    const Index p = w.parameters(u, 0, Form::update_after, true);
    w.run();
    EXPECT_TRUE(w.scheduler->ready(p));
    const Index g = w.gradients(u, 100, false, true);
    w.commit(g, true, true);
    w.release(p);
    w.run();
    EXPECT_EQ(w.scheduler->updates_done(u), 1u);
  }
}

TEST(Scheduler, ServesUpdatesInTheOrderInWhichTheirGradientsCome) {
  // Two units are open; the one whose parameters were opened last commits first, and there is one slot of each kind.
  World w(2, 1, small(2, 1, 1), Tier::nvme, Tier::nvme, Tier::host, false);
  const Index p0 = w.parameters(0, 0, Form::update_after, true);
  const Index p1 = w.parameters(1, 10, Form::fetch, true);
  const Index g1 = w.gradients(1, 100, true, true);
  w.run();
  w.commit(g1, true, true);
  const Index g0 = w.gradients(0, 110, false, true);
  w.commit(g0, true, true);
  w.run();
  EXPECT_TRUE(w.scheduler->idle()) << w.scheduler->describe();
  EXPECT_EQ(w.scheduler->updates_done(0), 1u);
  EXPECT_EQ(w.scheduler->updates_done(1), 1u);
  w.release(p0);
  w.release(p1);
}

TEST(Scheduler, GivesAnUpdatesSlotBackWhenItsGradientIsGivenUp) {
  World w(2, 1, small(1, 1, 1));
  const Index p = w.parameters(0, 0, Form::update_after, true);
  const Index g = w.gradients(0, 100, false, true);
  const Index q = w.parameters(1, 10, Form::update_after, true);  // wants the same slot
  w.run();
  EXPECT_FALSE(w.scheduler->ready(q));
  w.release(g);
  w.run();
  EXPECT_TRUE(w.scheduler->ready(q));
  w.release(p);
  w.release(q);
  w.scheduler->decide(true);
  w.scheduler->cancel_expected();
  w.run();
  EXPECT_TRUE(w.scheduler->idle());
  EXPECT_EQ(w.scheduler->updates_done(0), 0u);
}

TEST(Scheduler, MakesAnEagerUnitDueThatMissedItsLastContribution) {
  World w(1, 1);
  w.contribute(0, false, true);
  const Index p = w.parameters(0, 0, Form::update_after, true);
  w.run();
  w.release(p);
  w.scheduler->decide(true);
  w.verify();
  EXPECT_TRUE(w.scheduler->unit_update_due(0));
  const Index q = w.parameters(0, 0, Form::fetch, true);
  w.run();
  EXPECT_TRUE(w.scheduler->ready(q));
  EXPECT_EQ(w.scheduler->updates_done(0), 1u);
}

TEST(Scheduler, UpdatesParametersOnTheDeviceOnlyWhenTheirReadersAreGone) {
  World w(1, 1, small(1, 1, 1), Tier::device, Tier::host, Tier::host);
  const Index p = w.parameters(0, 0, Form::update_after, true);
  const Index g = w.gradients(0, 100, false, true);
  w.commit(g, true, true);
  EXPECT_EQ(w.run(), (Names{"copy out 0", "accumulate 0"}));
  w.release(p);
  EXPECT_EQ(w.run(), (Names{"update 0"}));
  const Index q = w.parameters(0, 0, Form::fetch, true);
  EXPECT_TRUE(w.scheduler->ready(q));
}

// --- gradients -------------------------------------------------------------------------------------------------------

TEST(Scheduler, AddsContributionsOneAfterAnother) {
  World w(1, 1, small(1, 1, 1));
  const auto contribute = [&](bool last) {
    const Index g = w.gradients(0, 100, false, true);
    EXPECT_TRUE(w.scheduler->ready(g));
    w.commit(g, last, false);
    w.start();
    const Action copy = w.flight("copy out 0");
    w.finish("copy out 0");
    for (const std::string& task : w.start()) w.finish(task);
    return copy;
  };
  const Action first = contribute(false);
  EXPECT_TRUE(first.first);
  EXPECT_EQ(first.slot, kNone);  // straight to the store
  const Action second = contribute(false);
  EXPECT_FALSE(second.first);
  EXPECT_NE(second.slot, kNone);
  const Action third = contribute(true);
  EXPECT_TRUE(third.last);
  EXPECT_FALSE(w.scheduler->gradients_outstanding());
}

TEST(Scheduler, AddsContributionsOnTheDeviceInPlace) {
  World w(1, 1, small(1, 1, 1), Tier::nvme, Tier::nvme, Tier::device);
  const Index g = w.gradients(0, 100, false, true);
  w.commit(g, true, false);
  EXPECT_EQ(w.start(), (Names{"accumulate 0"}));
  EXPECT_EQ(w.flight("accumulate 0").device_offset, 100u);
  EXPECT_TRUE(w.scheduler->entry_alive(g));
  w.run();
  EXPECT_FALSE(w.scheduler->entry_alive(g));
}

TEST(Scheduler, TellsTheLastContributionOfAChunkThatIsAbsentInIt) {
  World w(1, 1);
  w.contribute(0, false);
  const Index g = w.gradients(0, 100, false, true);
  w.commit(g, true, false, {0});
  w.start();
  EXPECT_TRUE(w.flight("copy out 0").last);
  w.run();
  w.scheduler->decide(true);
  EXPECT_TRUE(w.scheduler->update_due(0));
}

TEST(Scheduler, EndsAGradientWithoutAnyContributionAtOnce) {
  World w(1, 2);
  const Index g = w.gradients(0, 100, false, true);
  w.commit(g, true, false, {0, 0});
  EXPECT_FALSE(w.scheduler->entry_alive(g));
  w.scheduler->decide(true);
  EXPECT_FALSE(w.scheduler->unit_update_due(0));
}

TEST(Scheduler, HoldsGradientMemoryUntilTheLastByteHasLeft) {
  World w(1, 1);
  const Index g = w.gradients(0, 100, false, true);
  w.commit(g, false, false);
  const Index h = w.gradients(0, 100, false, true);
  EXPECT_FALSE(w.scheduler->ready(h));
  w.run();
  EXPECT_TRUE(w.scheduler->ready(h));
}

TEST(Scheduler, KeepsRoomForTheJobsOfACommit) {
  Limits l = small(1, 1, 1);
  l.jobs = 9;
  World w(2, 2, l);
  const Index g = w.gradients(0, 100, false, true);
  while (w.scheduler->append_parameters(1, 0, Form::fetch, false) != kNone) {
  }
  w.verify();
  w.commit(g, true, true);  // its gradient jobs and its updates
  w.run();
  EXPECT_EQ(w.scheduler->updates_done(0), 1u);
}

// --- leaving the expected order --------------------------------------------------------------------------------------

TEST(Scheduler, GivesBackEverythingExpectedWhenCancelled) {
  World w(3, 2, small(2, 2, 1));
  w.parameters(0, 0, Form::fetch, false);
  w.parameters(1, 10, Form::update_expected, false);
  w.gradients(2, 20, true, false);
  w.start();  // reads are in flight
  w.scheduler->cancel_expected();
  w.verify();
  EXPECT_FALSE(w.scheduler->idle());  // what is in flight still holds its slots
  w.run();
  EXPECT_TRUE(w.scheduler->idle());
  EXPECT_EQ(w.scheduler->entries_alive(), 0u);
  const Index p = w.parameters(2, 0, Form::fetch, true);
  w.run();
  EXPECT_TRUE(w.scheduler->ready(p));
}

TEST(Scheduler, WaitsForACancelledCopyBeforeItsMemoryIsUsedAgain) {
  World w(2, 1);
  w.parameters(0, 0, Form::fetch, false);
  w.start();
  w.finish("read 0");
  w.start();  // the copy is in flight
  w.scheduler->cancel_expected();
  const Index p = w.parameters(1, 0, Form::fetch, true);
  w.start();
  w.finish("read 1");
  EXPECT_EQ(w.start(), Names{});
  w.finish("copy in 0");
  EXPECT_EQ(w.run(), (Names{"copy in 1"}));
  EXPECT_TRUE(w.scheduler->ready(p));
}

TEST(Scheduler, CarriesACancelledUpdateThroughThatHasBegun) {
  World w(1, 1);
  w.contribute(0, true);
  w.scheduler->decide(true);
  w.parameters(0, 0, Form::fetch, false);
  w.start();
  w.finish("read 0");
  w.start();  // the update runs
  w.scheduler->cancel_expected();
  w.verify();
  EXPECT_EQ(w.run(), (Names{"write 0"}));
  EXPECT_EQ(w.scheduler->updates_done(0), 1u);
  const Index p = w.parameters(0, 0, Form::fetch, true);
  EXPECT_EQ(w.run(), (Names{"read 0", "copy in 0"}));
  EXPECT_TRUE(w.scheduler->ready(p));
}

TEST(Scheduler, KeepsAnUpdateDueWhoseJobWasCancelledInTime) {
  World w(1, 1);
  w.contribute(0, true);
  w.scheduler->decide(true);
  w.parameters(0, 0, Form::fetch, false);
  w.start();
  w.scheduler->cancel_expected();
  EXPECT_TRUE(w.scheduler->unit_update_due(0));
  w.run();
  EXPECT_EQ(w.scheduler->updates_done(0), 0u);
  EXPECT_TRUE(w.scheduler->append_updates(0));
  w.run();
  EXPECT_EQ(w.scheduler->updates_done(0), 1u);
}

TEST(Scheduler, FindsWhatATrainerHoldsInAStretchOfMemory) {
  World w(3, 1);
  const Index a = w.parameters(0, 0, Form::fetch, true);
  const Index b = w.parameters(1, 10, Form::fetch, true);
  w.parameters(2, 20, Form::fetch, false);
  EXPECT_EQ(w.scheduler->overlapping(5, 10, kNone, true), a);
  EXPECT_EQ(w.scheduler->overlapping(5, 10, a, true), b);
  EXPECT_EQ(w.scheduler->overlapping(25, 1, kNone, true), kNone);
  EXPECT_NE(w.scheduler->overlapping(25, 1, kNone, false), kNone);
  w.scheduler->note_release_requested(a);
  EXPECT_EQ(w.scheduler->overlapping(0, 5, kNone, true), kNone);
  EXPECT_EQ(w.scheduler->overlapping(0, 0, kNone, false), kNone);
}

TEST(Scheduler, RefusesEntriesBeyondItsTables) {
  Limits l;
  l.entries = 2;
  World w(1, 1, l);
  EXPECT_TRUE(w.scheduler->room_for(0));
  EXPECT_NE(w.scheduler->append_parameters(0, 0, Form::fetch, false), kNone);
  EXPECT_NE(w.scheduler->append_parameters(0, 20, Form::fetch, false), kNone);
  EXPECT_FALSE(w.scheduler->room_for(0));
  EXPECT_EQ(w.scheduler->append_parameters(0, 40, Form::fetch, false), kNone);
}

// --- the state -------------------------------------------------------------------------------------------------------

TEST(Scheduler, SerializesEqualBehaviourAsEqualWords) {
  World w(2, 1);
  std::vector<std::uint32_t> before, after, during;
  w.scheduler->serialize(before);
  for (int i = 0; i < 3; ++i) {
    const Index p = w.parameters(0, 0, Form::fetch, true);
    w.run();
    during.clear();
    w.scheduler->serialize(during);
    EXPECT_NE(during, before);
    w.release(p);
    w.parameters(1, 5, Form::fetch, true);  // overwrites the copy
    w.scheduler->serialize(after);
    after.clear();
    w.run();
    w.release(w.scheduler->overlapping(5, 10, kNone, true));
    w.gradients(0, 0, false, true);  // and forgets that one too
    w.release(w.scheduler->overlapping(0, 10, kNone, true));
    w.scheduler->serialize(after);
    EXPECT_EQ(after, before);
  }
}

TEST(Scheduler, DescribesWhatItWaitsFor) {
  World w(1, 1);
  w.parameters(0, 0, Form::update_expected, false);
  w.run();
  const std::string text = w.scheduler->describe();
  EXPECT_NE(text.find("parameters of unit 0"), std::string::npos) << text;
  EXPECT_NE(text.find("waits for the decision"), std::string::npos) << text;
}

}  // namespace
}  // namespace ballast::schedule
