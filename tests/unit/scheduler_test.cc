// The scheduler by hand: fetching, just in time, after backward; its state as words and text.
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <string>
#include <vector>

#include "scheduler_world.h"

namespace ballast::schedule {
namespace {

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

TEST(Scheduler, SaysWhetherAUseIsAssuredOfItsRangeOrWaitsForAnotherToLeaveIt) {
  World w(2, 1);
  const Index held = w.parameters(0, 0, Form::fetch, true);
  w.run();
  EXPECT_TRUE(w.scheduler->range_assured(held));
  EXPECT_TRUE(w.scheduler->range_assured(w.parameters(0, 0, Form::fetch, false))) << "shares what is held";
  EXPECT_FALSE(w.scheduler->range_assured(w.parameters(1, 0, Form::fetch, false)));
  // Of the same unit, but what is held has been written over by then.
  EXPECT_FALSE(w.scheduler->range_assured(w.parameters(0, 0, Form::fetch, false)));
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
