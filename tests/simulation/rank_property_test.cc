// Random plans on two to four ranks, each in one random order. BALLAST_SEED=n runs one seed; BALLAST_SEEDS=n runs that
// many. SPDX-License-Identifier: Apache-2.0
#include <ballast/simulate/random_plan.h>
#include <ballast/simulate/rank_group.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace ballast::simulate {
namespace {

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

void run_seeds(std::uint64_t seeds, bool groups, const char* name) {
  const std::uint64_t one = from_environment("BALLAST_SEED", ~0ull);
  seeds = from_environment("BALLAST_SEEDS", seeds);
  std::uint64_t tasks = 0, collectives = 0, deviations = 0;
  for (std::uint64_t seed = one == ~0ull ? 0 : one; seed < (one == ~0ull ? seeds : one + 1); ++seed) {
    RandomPlanOptions options;
    options.ranks = static_cast<Index>(2 + seed % 3);
    options.groups = groups;
    const Plan plan = random_plan(seed, options);
    const RankRun run = run_ranks(plan, seed);
    ASSERT_EQ(run.failure, "") << "repeat with: BALLAST_SEED=" << seed << " schedule_ranks_test --gtest_filter='*"
                               << name << "'";
    tasks += run.tasks;
    collectives += run.collectives;
    deviations += run.deviations;
  }
  std::printf("%llu tasks, %llu collectives, %llu deviations from the trace\n", static_cast<unsigned long long>(tasks),
              static_cast<unsigned long long>(collectives), static_cast<unsigned long long>(deviations));
}

TEST(RankProperties, RandomPlansEndWithTheSameCollectivesAndEveryChunkUpdatedOnceForEachDecision) {
  run_seeds(2'000, false, "EachDecision");
}

TEST(RankProperties, SoTheyDoWhereSomeUnitsAreSharedByFewerRanks) { run_seeds(1'000, true, "FewerRanks"); }

}  // namespace
}  // namespace ballast::simulate
