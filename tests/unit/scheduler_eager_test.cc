// The scheduler by hand: eager updates, gradients, and trainers that leave the expected order.
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <string>
#include <vector>

#include "scheduler_world.h"

namespace ballast::schedule {
namespace {

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

TEST(Scheduler, KeepsSumsOnNvmeAndReadsThemForTheUpdateOnceTheyAreFinal) {
  World w(1, 1, small(1, 1, 1), Tier::nvme, Tier::nvme, Tier::nvme);
  const Index first = w.gradients(0, 100, false, true);
  w.commit(first, false, false);
  EXPECT_EQ(w.run(), (Names{"copy out 0", "accumulate 0", "write 0"}));
  const Index second = w.gradients(0, 100, false, true);
  const Index next = w.parameters(0, 0, Form::update_expected, false);
  EXPECT_EQ(w.run(), (Names{"read 0"}));  // the states; the sum is not final
  w.commit(second, true, false);
  EXPECT_EQ(w.run(), (Names{"read 0", "copy out 0", "accumulate 0", "write 0"}));
  EXPECT_FALSE(w.scheduler->entry_alive(second));
  w.scheduler->decide(true);
  EXPECT_EQ(w.run(), (Names{"read gradient 0", "update 0", "write 0", "copy in 0"}));
  EXPECT_TRUE(w.scheduler->expected(next));
}

TEST(Scheduler, UpdatesEagerlyOnlyWithASumThatIsWritten) {
  World w(1, 1, small(1, 1, 1), Tier::host, Tier::host, Tier::nvme);
  const Index g = w.gradients(0, 100, false, true);
  w.commit(g, true, true);
  EXPECT_EQ(w.start(), (Names{"copy out 0"}));
  w.finish("copy out 0");
  EXPECT_EQ(w.start(), (Names{"accumulate 0"}));
  w.finish("accumulate 0");
  EXPECT_EQ(w.start(), (Names{"write 0"}));
  EXPECT_TRUE(w.scheduler->gradients_outstanding());
  w.finish("write 0");
  EXPECT_FALSE(w.scheduler->gradients_outstanding());
  EXPECT_EQ(w.run(), (Names{"read gradient 0", "update 0"}));
  w.scheduler->decide(true);
  EXPECT_EQ(w.scheduler->updates_done(0), 1u);
}

TEST(Scheduler, ReadsNoGradientForADiscardedUpdate) {
  World w(1, 1, small(1, 1, 1), Tier::nvme, Tier::nvme, Tier::nvme);
  w.contribute(0, true);
  w.parameters(0, 0, Form::update_expected, false);
  w.run();
  w.scheduler->decide(false);
  EXPECT_EQ(w.run(), (Names{"copy in 0"}));
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

}  // namespace
}  // namespace ballast::schedule
