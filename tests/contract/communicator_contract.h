// What every communicator promises, run over each kind. A World makes one communicator for every rank that this process
// plays (one of an MPI world, all of an in-process one) and runs a body for each, on a thread of its own.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/communicators/agreement.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "communicator_world.h"
#include "stress/allocation_counter.h"

namespace ballast::testing {

class CommunicatorContract : public ::testing::TestWithParam<World> {
 protected:
  void run(std::chrono::milliseconds timeout, const Body& body) const { GetParam().run(timeout, body); }
  int size() const { return GetParam().size; }
  bool alone() const { return size() == 1; }
  std::uint64_t seed_ = contract_seed();
  ::testing::ScopedTrace trace_{
      __FILE__, __LINE__, "repeat with BALLAST_SEED=" + std::to_string(seed_) + " and this test's --gtest_filter"};
};

// What takes two.
class SeveralRanksContract : public CommunicatorContract {};

inline const DataType kTypes[] = {DataType::fp32, DataType::bf16, DataType::fp16};

TEST_P(CommunicatorContract, KnowsItsPlaceInTheWorld) {
  run(kPatient, [&](Communicator& c) {
    EXPECT_EQ(c.world_size(), size());
    EXPECT_GE(c.rank(), 0);
    EXPECT_LT(c.rank(), size());
    EXPECT_FALSE(c.name().empty());
    std::vector<std::byte> all(at(size()));
    const std::byte mine = static_cast<std::byte>(c.rank());
    c.all_gather({&mine, 1}, all);
    for (int r = 0; r < size(); ++r) EXPECT_EQ(static_cast<int>(all[at(r)]), r);
  });
}

TEST_P(CommunicatorContract, SmallSumsAreAddedInRankOrderAndAlikeEverywhere) {
  run(kPatient, [&](Communicator& c) {
    base::Random random(seed_);
    for (int round = 0; round < 40; ++round) {
      const std::size_t count = round < 3 ? at(round) : random.below(round % 8 == 0 ? 70000 : 60);
      std::vector<double> values(count);
      std::vector<double> expected(count);
      for (std::size_t i = 0; i < count; ++i) {
        const auto value = [&](int r) { return 1.0 / (1.0 + static_cast<double>(value_at(seed_, r, i))); };
        values[i] = value(c.rank());
        expected[i] = value(0);
        for (int r = 1; r < size(); ++r) expected[i] += value(r);
      }
      c.all_reduce_sum(values);
      ASSERT_EQ(count == 0 ? 0 : std::memcmp(values.data(), expected.data(), count * sizeof(double)), 0)
          << count << " values";
    }
  });
}

TEST_P(CommunicatorContract, BytesAreGatheredAndBroadcastAtAnySize) {
  run(kPatient, [&](Communicator& c) {
    base::Random random(seed_ + 1);
    for (int round = 0; round < 30; ++round) {
      const std::size_t bytes =
          round < 3 ? at(round) : random.below(round % 8 == 0 ? 10 * kManyElements / at(size()) : 400);
      const auto content = [&](int r) {
        std::vector<std::byte> out(bytes);
        for (std::size_t i = 0; i < bytes; ++i) {
          out[i] = static_cast<std::byte>(base::mix(seed_ + at(r) * 77 + i / 8) >> (i % 8 * 8));
        }
        return out;
      };
      const std::vector<std::byte> mine = content(c.rank());
      std::vector<std::byte> all(bytes * at(size()));
      c.all_gather(mine, all);
      for (int r = 0; r < size(); ++r) ASSERT_TRUE(slice(all, at(r), bytes) == content(r)) << bytes;
      const int root = static_cast<int>(random.below(at(size())));
      std::vector<std::byte> sent = mine;
      c.broadcast(sent, root);
      ASSERT_TRUE(sent == content(root)) << bytes << " from " << root;
      if (round % 10 == 0) c.barrier();
    }
  });
}

TEST_P(CommunicatorContract, GathersPartsInPlaceOnAStream) {
  run(kPatient, [&](Communicator& c) {
    RankStream stream;
    base::Random random(seed_ + 2);
    for (int round = 0; round < 20; ++round) {
      const std::size_t bytes =
          round < 3 ? at(round) : random.below(round % 6 == 0 ? 10 * kManyElements / at(size()) : 5000);
      std::vector<std::byte> data(bytes * at(size()), std::byte{0xEE});
      const auto mine = data_of(seed_ + at(round), c.rank(), DataType::bf16, bytes / 2 + 1);
      if (bytes != 0) std::memcpy(data.data() + at(c.rank()) * bytes, mine.data(), bytes);
      c.all_gather(data.data(), bytes, *stream);
      stream->synchronize();
      for (int r = 0; r < size(); ++r) {
        auto expected = data_of(seed_ + at(round), r, DataType::bf16, bytes / 2 + 1);
        expected.resize(bytes);
        ASSERT_TRUE(slice(data, at(r), bytes) == expected) << bytes << " bytes, part " << r;
      }
    }
    c.check();
  });
}

TEST_P(CommunicatorContract, ReduceScatterAddsInRankOrderAndRoundsOnce) {
  run(kPatient, [&](Communicator& c) {
    RankStream stream;
    base::Random random(seed_ + 3);
    for (const DataType type : kTypes) {
      for (int round = 0; round < 12; ++round) {
        const std::size_t part =
            round < 3 ? at(round) : random.below(round % 6 == 0 ? kManyElements / at(size()) : 5000);
        const std::uint64_t seed = seed_ + at(round);
        auto data = data_of(seed, c.rank(), type, part * at(size()));
        const std::size_t bytes = part * element_bytes(type);
        const auto expected = slice(summed(seed, size(), type, part * at(size())), at(c.rank()), bytes);
        if (round % 2 == 0) {
          std::vector<std::byte> out(bytes);
          const auto before = data;
          c.reduce_scatter_sum(data.data(), out.data(), part, type, *stream);
          stream->synchronize();
          ASSERT_TRUE(out == expected) << part << " elements of " << to_string(type);
          ASSERT_TRUE(data == before) << "the source changed";
        } else {
          std::byte* const own = data.data() + at(c.rank()) * bytes;
          c.reduce_scatter_sum(data.data(), own, part, type, *stream);
          stream->synchronize();
          ASSERT_TRUE(slice(data, at(c.rank()), bytes) == expected) << part << " in place, " << to_string(type);
        }
      }
    }
    c.check();
  });
}

TEST_P(CommunicatorContract, AllReduceAddsInRankOrderInPlace) {
  run(kPatient, [&](Communicator& c) {
    RankStream stream;
    base::Random random(seed_ + 4);
    for (const DataType type : kTypes) {
      for (int round = 0; round < 10; ++round) {
        const std::size_t elements = round < 3 ? at(round) : random.below(round % 5 == 0 ? kManyElements : 3000);
        const std::uint64_t seed = seed_ + 50 + at(round);
        auto data = data_of(seed, c.rank(), type, elements);
        c.all_reduce_sum(data.data(), elements, type, *stream);
        stream->synchronize();
        ASSERT_TRUE(data == summed(seed, size(), type, elements)) << elements << " of " << to_string(type);
      }
    }
    c.check();
  });
}

TEST_P(CommunicatorContract, CallsAreUnderWayOnTwoDuplicatesAtOnce) {
  run(kPatient, [&](Communicator& c) {
    const auto first = c.duplicate();
    const auto second = c.duplicate();
    RankStream first_stream;
    RankStream second_stream;
    constexpr int kCalls = 60;
    constexpr std::size_t kPart = 1001;
    std::vector<std::vector<std::byte>> a;
    std::vector<std::vector<std::byte>> b;
    for (int i = 0; i < kCalls; ++i) {
      a.push_back(data_of(seed_ + at(i), c.rank(), DataType::fp32, kPart * at(size())));
      b.push_back(data_of(seed_ + 500 + at(i), c.rank(), DataType::bf16, kPart));
    }
    // Ranks queue in different orders: each duplicate has an order of its own.
    for (int i = 0; i < kCalls; ++i) {
      const auto on_first = [&] {
        first->reduce_scatter_sum(a[at(i)].data(), a[at(i)].data() + at(c.rank()) * kPart * 4, kPart, DataType::fp32,
                                  *first_stream);
      };
      const auto on_second = [&] { second->all_reduce_sum(b[at(i)].data(), kPart, DataType::bf16, *second_stream); };
      if ((c.rank() + i) % 2 == 0) {
        on_first();
        on_second();
      } else {
        on_second();
        on_first();
      }
      if (i % 8 == 0) {
        double one = 1.0;
        c.all_reduce_sum({&one, 1});
        ASSERT_EQ(one, size());
      }
    }
    first_stream->synchronize();
    second_stream->synchronize();
    first->check();
    second->check();
    for (int i = 0; i < kCalls; ++i) {
      const auto sums = summed(seed_ + at(i), size(), DataType::fp32, kPart * at(size()));
      ASSERT_TRUE(slice(a[at(i)], at(c.rank()), kPart * 4) == slice(sums, at(c.rank()), kPart * 4)) << i;
      ASSERT_TRUE(b[at(i)] == summed(seed_ + 500 + at(i), size(), DataType::bf16, kPart)) << i;
    }
  });
}

TEST_P(CommunicatorContract, ABlockingCallMayOvertakeOneThatWaitsOnItsStream) {
  run(kPatient, [&](Communicator& c) {
    RankStream stream;
    std::promise<void> opened;
    // Only some ranks' streams are held, so the orders of running differ between ranks.
    const auto gate = opened.get_future().share();
    const offload::HostCall hold{
        [](void* context, std::uint64_t) { static_cast<const std::shared_future<void>*>(context)->wait(); },
        const_cast<std::shared_future<void>*>(&gate), 0};
    if (c.rank() % 2 == 0) stream->call(hold);
    auto data = data_of(seed_, c.rank(), DataType::fp32, 999);
    c.all_reduce_sum(data.data(), 999, DataType::fp32, *stream);
    for (int i = 0; i < 5; ++i) {
      double one = 1.0;
      c.all_reduce_sum({&one, 1});
      EXPECT_EQ(one, size());
    }
    opened.set_value();
    stream->synchronize();
    EXPECT_TRUE(data == summed(seed_, size(), DataType::fp32, 999));
  });
}

TEST_P(CommunicatorContract, SplitMakesGroupsInTheOrderOfRanks) {
  run(kPatient, [&](Communicator& c) {
    for (const int groups : {1, 2, 3}) {
      const auto group = c.split(100 - c.rank() % groups);
      const int expected_size = (size() - c.rank() % groups + groups - 1) / groups;
      ASSERT_EQ(group->world_size(), expected_size);
      ASSERT_EQ(group->rank(), c.rank() / groups);
      std::vector<double> values = {static_cast<double>(c.rank()), 1.0};
      group->all_reduce_sum(values);
      double ranks = 0;
      for (int r = c.rank() % groups; r < size(); r += groups) ranks += r;
      EXPECT_EQ(values[0], ranks);
      EXPECT_EQ(values[1], expected_size);
      // The other cut, made from the first one's duplicate: one rank of each group.
      const auto across = group->duplicate()->split(group->rank());
      EXPECT_EQ(across->world_size(), 1);
      RankStream stream;
      auto data = data_of(seed_, group->rank(), DataType::fp32, 501);
      group->all_reduce_sum(data.data(), 501, DataType::fp32, *stream);
      stream->synchronize();
      EXPECT_TRUE(data == summed(seed_, expected_size, DataType::fp32, 501));
    }
  });
}

// One rank, the last, does something else than the others at the second call of the communicator.
inline void expect_odd_one_named(const Communicator& c, int size, const std::string& text) {
  EXPECT_THAT(text, ::testing::HasSubstr(rank_name(size - 1) + " made")) << "at rank " << c.rank();
  EXPECT_THAT(text, ::testing::HasSubstr("call 1 (")) << "at rank " << c.rank();
}

TEST_P(SeveralRanksContract, AnotherCallAtTheSamePlaceIsAnErrorThatNamesWhoMadeIt) {
  run(kPatient, [&](Communicator& c) {
    c.barrier();
    double one = 1.0;
    const std::string text = failure_of([&] { c.rank() == size() - 1 ? c.barrier() : c.all_reduce_sum({&one, 1}); });
    expect_odd_one_named(c, size(), text);
    EXPECT_THAT(text, ::testing::AllOf(::testing::HasSubstr("barrier"), ::testing::HasSubstr("sum of 1 values")));
    EXPECT_EQ(failure_of([&] { c.check(); }), text);
    EXPECT_EQ(failure_of([&] { c.barrier(); }), text);
  });
}

TEST_P(SeveralRanksContract, AnotherSizeIsAnErrorThatNamesWhoGaveIt) {
  for (const std::size_t elements : {std::size_t{10}, std::size_t{200000}}) {
    run(kPatient, [&](Communicator& c) {
      c.barrier();
      RankStream stream;
      const std::size_t part = elements + (c.rank() == size() - 1 ? 1 : 0);
      std::vector<std::byte> data(part * 4 * at(size()));
      c.reduce_scatter_sum(data.data(), data.data(), part, DataType::fp32, *stream);
      stream->synchronize();
      const std::string text = failure_of([&] { c.check(); });
      expect_odd_one_named(c, size(), text);
      EXPECT_THAT(text, ::testing::HasSubstr(std::to_string(elements * 4)));
      EXPECT_THAT(text, ::testing::HasSubstr(std::to_string(elements * 4 + 4)));
    });
  }
}

TEST_P(SeveralRanksContract, AnotherTypeOrUnitIsAnErrorThatNamesWhoGaveIt) {
  for (const bool other_type : {true, false}) {
    run(kPatient, [&](Communicator& c) {
      c.barrier();
      RankStream stream;
      const bool odd = c.rank() == size() - 1;
      std::vector<std::byte> data(2000);
      c.set_unit(odd && !other_type ? 3 : 2);
      c.all_reduce_sum(data.data(), 1000, odd && other_type ? DataType::fp16 : DataType::bf16, *stream);
      stream->synchronize();
      const std::string text = failure_of([&] { c.check(); });
      expect_odd_one_named(c, size(), text);
      EXPECT_THAT(text, ::testing::HasSubstr(other_type ? "of fp16" : "for unit 3"));
      EXPECT_THAT(text, ::testing::HasSubstr("of bf16 for unit 2"));
    });
  }
}

TEST_P(SeveralRanksContract, AnotherRootIsAnErrorThatNamesWhoGaveIt) {
  run(kPatient, [&](Communicator& c) {
    c.barrier();
    std::vector<std::byte> data(100);
    const std::string text = failure_of([&] { c.broadcast(data, c.rank() == size() - 1 ? 1 : 0); });
    expect_odd_one_named(c, size(), text);
    EXPECT_THAT(text, ::testing::HasSubstr("from rank 0"));
    EXPECT_THAT(text, ::testing::HasSubstr("from rank 1"));
  });
}

TEST_P(SeveralRanksContract, ARankThatDoesNotComeIsNamedWithinTheTimeout) {
  run(kShort, [&](Communicator& c) {
    const auto begin = std::chrono::steady_clock::now();
    if (c.rank() == size() - 1) {
      std::this_thread::sleep_for(kShort * 2);
      EXPECT_THAT(failure_of([&] { c.barrier(); }), ::testing::HasSubstr(rank_name(c.rank())));
      return;
    }
    const std::string text = failure_of([&] { c.barrier(); });
    EXPECT_THAT(text, ::testing::HasSubstr(rank_name(size() - 1)));
    EXPECT_THAT(text, ::testing::HasSubstr("call 0 (barrier)"));
    for (int r = 0; r + 1 < size(); ++r) EXPECT_THAT(text, ::testing::Not(::testing::HasSubstr(rank_name(r) + " ")));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kShort + std::chrono::seconds(5));
    EXPECT_EQ(failure_of([&] { c.check(); }), text);
  });
}

TEST_P(SeveralRanksContract, ARankMissingFromALargeCallIsLatchedAndThrownByTheNext) {
  run(kShort, [&](Communicator& c) {
    if (c.rank() == 0) {
      std::this_thread::sleep_for(kShort * 2);
      EXPECT_THAT(failure_of([&] { c.barrier(); }), ::testing::HasSubstr("rank 0"));
      return;
    }
    RankStream stream;
    std::vector<std::byte> data(4000 * at(size()));
    for (int i = 0; i < 3; ++i) c.all_gather(data.data(), 4000, *stream);
    stream->synchronize();
    const std::string text = failure_of([&] { c.check(); });
    EXPECT_THAT(text, ::testing::HasSubstr("rank 0 did not come to call 0 (all-gather"));
    EXPECT_EQ(failure_of([&] { c.all_gather(data.data(), 4000, *stream); }), text);
    EXPECT_EQ(failure_of([&] { c.barrier(); }), text);
    EXPECT_EQ(failure_of([&] { c.duplicate(); }), text);
  });
}

TEST_P(CommunicatorContract, AbortEndsWhatIsUnderWayAndCarriesItsReason) {
  if (!GetParam().carries_reasons) GTEST_SKIP() << "this transport alone carries no reasons to other ranks";
  run(kPatient, [&](Communicator& c) {
    c.barrier();
    RankStream stream;
    std::vector<std::byte> data(4000 * at(size()));
    const auto begin = std::chrono::steady_clock::now();
    if (c.rank() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      c.abort("the disk is full");
      c.abort("again");
    } else if (c.rank() % 2 == 0) {
      c.all_gather(data.data(), 4000, *stream);
      stream->synchronize();
    } else {
      EXPECT_THAT(failure_of([&] {
                    c.all_gather({data.data(), 4000}, data);
                  }),
                  ::testing::HasSubstr("rank 0 gave up: the disk is full"));
    }
    EXPECT_THAT(failure_of([&] { c.check(); }), ::testing::HasSubstr("rank 0 gave up: the disk is full"));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  });
}

TEST_P(CommunicatorContract, AFailureEndsWhatIsUnderWayOnThoseMadeFromIt) {
  if (!GetParam().carries_reasons) GTEST_SKIP() << "this transport alone carries no reasons to other ranks";
  run(kPatient, [&](Communicator& c) {
    const auto child = c.duplicate();
    const auto grandchild = child->split(0);
    const auto begin = std::chrono::steady_clock::now();
    if (c.rank() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      c.abort("enough");
    } else {
      EXPECT_THAT(failure_of([&] { grandchild->barrier(); }), ::testing::HasSubstr("rank 0 gave up: enough"));
    }
    EXPECT_THAT(failure_of([&] { child->check(); }), ::testing::HasSubstr("enough"));
    EXPECT_THAT(failure_of([&] { grandchild->check(); }), ::testing::HasSubstr("enough"));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  });
}

TEST_P(CommunicatorContract, AFailureOfOneMadeFromItLeavesItWhole) {
  run(kPatient, [&](Communicator& c) {
    const auto child = c.duplicate();
    child->barrier();
    c.barrier();
    if (c.rank() == 0) child->abort("only this one");
    c.barrier();
    double one = 1.0;
    c.all_reduce_sum({&one, 1});
    EXPECT_EQ(one, size());
    if (alone()) {
      EXPECT_THAT(failure_of([&] { child->check(); }), ::testing::HasSubstr("only this one"));
    }
  });
}

TEST_P(SeveralRanksContract, DestructionWithWorkQueuedEndsInTime) {
  run(kShort, [&](Communicator& c) {
    RankStream stream;
    std::vector<std::byte> data(4000 * at(size()));
    const auto begin = std::chrono::steady_clock::now();
    {
      const auto child = c.duplicate();
      // The last rank goes away at once; the others have work queued that can only fail.
      if (c.rank() != size() - 1) {
        try {
          for (int i = 0; i < 3; ++i) child->all_gather(data.data(), 4000, *stream);
        } catch (const CommunicationError&) {
          // The first has failed already.
        }
      }
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kShort * 3 + std::chrono::seconds(5));
    stream->synchronize();
  });
}

TEST_P(CommunicatorContract, RanksThatWereGivenTheSameAgree) {
  run(kPatient, [&](Communicator& c) {
    check_agreement(c, {});
    const std::vector<NamedValue> values = {{"version", "0.1.0"}, {"model", std::string(100000, 'm')}, {"", ""}};
    check_agreement(c, values);
    c.barrier();
  });
}

TEST_P(SeveralRanksContract, EveryRankHearsTheSameOfWhoWasGivenWhatElse) {
  run(kPatient, [&](Communicator& c) {
    const bool odd = c.rank() == size() - 1;
    const auto text_with = [&](const std::vector<NamedValue>& values) {
      const std::string text = failure_of([&] { check_agreement(c, values); });
      std::string fixed = text;
      fixed.resize(1000);
      std::vector<char> all(fixed.size() * at(size()));
      c.all_gather(std::as_bytes(std::span(fixed)), std::as_writable_bytes(std::span(all)));
      for (int r = 0; r < size(); ++r) {
        EXPECT_EQ(std::memcmp(all.data() + at(r) * fixed.size(), fixed.data(), fixed.size()), 0) << "rank " << r;
      }
      EXPECT_THAT(text, ::testing::HasSubstr(rank_name(size() - 1) + " differs in "));
      return text;
    };
    const std::string long_text(5000, 'x');
    std::string text = text_with({{"version", "1"}, {"configuration", long_text + (odd ? "yes" : "no") + long_text}});
    EXPECT_THAT(text, ::testing::HasSubstr("configuration: "));
    EXPECT_THAT(text, ::testing::AllOf(::testing::HasSubstr("xyesx"), ::testing::HasSubstr("xnox")));
    EXPECT_THAT(text, ::testing::HasSubstr("from character 5000 on"));
    EXPECT_LT(text.size(), 700U);
    text = text_with({{"version", odd ? "0.2.0" : "0.1.0"}});
    EXPECT_THAT(text, ::testing::HasSubstr("version: \"0.2.0\" there, \"0.1.0\" here"));
    std::vector<NamedValue> values = {{"model", "a"}, {"order", "b"}};
    if (odd) values.pop_back();
    text = text_with(values);
    EXPECT_THAT(text, ::testing::HasSubstr("it has 1 values, and here are 2"));
    values.assign(1, {odd ? "order" : "model", "a"});
    text = text_with(values);
    EXPECT_THAT(text, ::testing::HasSubstr("value 0 is \"order\" there and \"model\" here"));
    c.barrier();
    c.check();
  });
}

TEST_P(CommunicatorContract, SenselessArgumentsAreUsageErrorsAndChangeNothing) {
  run(kPatient, [&](Communicator& c) {
    std::vector<std::byte> data(10);
    EXPECT_THROW(c.broadcast(data, -1), UsageError);
    EXPECT_THROW(c.broadcast(data, size()), UsageError);
    std::vector<std::byte> all(10 * at(size()) + 1);
    EXPECT_THROW(c.all_gather(data, all), UsageError);
    c.barrier();
    c.check();
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, CommunicatorContract, ::testing::ValuesIn(worlds()),
                         [](const auto& world) { return world.param.name; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(SeveralRanksContract);  // a world of one rank has none
INSTANTIATE_TEST_SUITE_P(Worlds, SeveralRanksContract, ::testing::ValuesIn(worlds_of_several()),
                         [](const auto& world) { return world.param.name; });

}  // namespace ballast::testing
