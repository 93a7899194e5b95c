// Random plans on a virtual clock. BALLAST_SEED=n runs one seed and says more; BALLAST_SEEDS=n runs that many.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/simulate/random_plan.h>
#include <ballast/simulate/simulator.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace ballast::simulate {
namespace {

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

std::string repeat(std::uint64_t seed, const char* test) {
  return "\nrepeat with: BALLAST_SEED=" + std::to_string(seed) + " schedule_property_test --gtest_filter='*" + test +
         "'";
}

TEST(SchedulerProperties, RandomPlansEndWithEveryChunkUpdatedOnceForEachDecision) {
  const std::uint64_t one = from_environment("BALLAST_SEED", ~0ull);
  const std::uint64_t seeds = from_environment("BALLAST_SEEDS", 10'000);
  std::uint64_t tasks = 0, reliefs = 0, deviations = 0;
  for (std::uint64_t seed = one == ~0ull ? 0 : one; seed < (one == ~0ull ? seeds : one + 1); ++seed) {
    const Plan plan = random_plan(seed);
    const HardwareModel hardware = random_hardware(seed);
    const Simulation run = simulate(plan, hardware, seed);
    ASSERT_TRUE(run.failure.empty()) << run.failure << repeat(seed, "EachDecision");
    ASSERT_GE(run.time_ns, run.bound_ns) << plan.text << repeat(seed, "EachDecision");
    tasks += run.tasks;
    reliefs += run.reliefs;
    if (run.reliefs != 0) std::printf("%s: everything stood still\n", plan.text.c_str());
    deviations += run.deviations;
  }
  std::printf("%llu tasks, %llu deviations from the trace, %llu times what was expected had to be taken back\n",
              static_cast<unsigned long long>(tasks), static_cast<unsigned long long>(deviations),
              static_cast<unsigned long long>(reliefs));
}

}  // namespace
}  // namespace ballast::simulate
