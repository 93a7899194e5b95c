// HeldStep: what is copied in what order, and what is free to be written over.
// SPDX-License-Identifier: Apache-2.0
#include "durable/held_step.h"

#include <gtest/gtest.h>

namespace ballast::engine {
namespace {

const std::vector<StoredChunk> kChunks = {{0, 0, 0}, {1, 0, 0}, {0, 0, 0}, {1, 0, 0}};

std::vector<std::uint32_t> all_left(HeldStep& held) {
  std::vector<std::uint32_t> order;
  std::uint32_t chunk = 0;
  for (bool asked = false; held.next(&chunk, &asked);) {
    order.push_back(chunk);
    held.let_go(chunk);
  }
  return order;
}

TEST(HeldStep, NothingIsHeldUnasked) {
  HeldStep held(4);
  EXPECT_FALSE(held.holds(0, 0));
  EXPECT_TRUE(all_left(held).empty());
}

TEST(HeldStep, EachChunkIsCopiedOnceAndHeldInItsOwnSlotUntilThen) {
  HeldStep held(4);
  for (int round = 0; round < 2; ++round) {
    held.hold(kChunks);
    EXPECT_TRUE(held.holds(1, 1));
    EXPECT_FALSE(held.holds(1, 0));
    std::uint32_t chunk = 0;
    bool asked = false;
    ASSERT_TRUE(held.next(&chunk, &asked));
    EXPECT_EQ(chunk, 0U);
    EXPECT_TRUE(held.holds(0, 0)) << "it has not been read yet";
    held.let_go(0);
    EXPECT_FALSE(held.holds(0, 0));
    EXPECT_EQ(all_left(held), (std::vector<std::uint32_t>{1, 2, 3}));
    EXPECT_FALSE(held.holds(3, 1));
  }
  EXPECT_EQ(held.asked_count(), 0U);
}

TEST(HeldStep, WhatSomebodyWaitsForComesFirstAndOnce) {
  HeldStep held(4);
  held.hold(kChunks);
  held.ask_for(2);
  held.ask_for(2);
  std::uint32_t chunk = 0;
  bool asked = false;
  ASSERT_TRUE(held.next(&chunk, &asked));
  EXPECT_TRUE(asked);
  EXPECT_EQ(chunk, 2U);
  held.ask_for(2);  // it is being read
  held.let_go(2);
  EXPECT_EQ(all_left(held), (std::vector<std::uint32_t>{0, 1, 3}));
  EXPECT_EQ(held.asked_count(), 1U);
}

TEST(HeldStep, WhatIsGivenUpIsFreeAndAnotherStepCanBeHeld) {
  HeldStep held(4);
  held.hold(kChunks);
  held.ask_for(3);
  held.let_go_all();
  EXPECT_FALSE(held.holds(3, 1));
  EXPECT_TRUE(all_left(held).empty());
  held.hold(kChunks);
  EXPECT_EQ(all_left(held), (std::vector<std::uint32_t>{0, 1, 2, 3}));
}

TEST(HeldStep, WhatAnUpdateHasReadOfItIsNotReadAgain) {
  HeldStep held(4);
  EXPECT_FALSE(held.take(1, 1)) << "nothing is held";
  held.hold(kChunks);
  EXPECT_FALSE(held.take(1, 0)) << "the other slot is of another step";
  EXPECT_TRUE(held.take(1, 1));
  EXPECT_TRUE(held.holds(1, 1)) << "until it is let go";
  EXPECT_FALSE(held.take(1, 1)) << "once";
  held.let_go(1);
  held.ask_for(2);
  EXPECT_TRUE(held.any_asked());
  EXPECT_FALSE(held.take(2, 0)) << "somebody waits for it already";
  EXPECT_EQ(all_left(held), (std::vector<std::uint32_t>{2, 0, 3}));
  EXPECT_FALSE(held.any_asked());
}

}  // namespace
}  // namespace ballast::engine
