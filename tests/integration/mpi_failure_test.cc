// Worlds of MPI ranks in which a rank dies, stops, hangs or gives up: every other rank ends with the right words in
// time. Starts mpirun itself, and counts the seconds. SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Outcome {
  int status = 0;
  double seconds = 0;
  std::string output;
  // What rank r said of its end; empty where it said nothing.
  std::string of(int rank) const {
    const std::string head = "rank " + std::to_string(rank) + ": ";
    const auto begin = output.find("\n" + head);
    if (begin == std::string::npos) return "";
    return output.substr(begin + 1, output.find('\n', begin + 1) - begin - 1);
  }
  double seconds_of(int rank) const {
    const std::string line = of(rank);
    const auto open = line.rfind('(');
    return open == std::string::npos ? -1 : std::strtod(line.c_str() + open + 1, nullptr);
  }
};

Outcome run(int ranks, const std::string& scenario) {
  // `timeout` ends an mpirun that hangs, and all it started; then the test fails by its status.
  const std::string command = "exec timeout -k 5 60 " MPIRUN " --allow-run-as-root --oversubscribe --bind-to none -n " +
                              std::to_string(ranks) + " " WORKER " " + scenario + " 2>&1";
  Outcome outcome;
  const auto begin = std::chrono::steady_clock::now();
  FILE* const pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) {
    ADD_FAILURE() << "popen failed";
    return outcome;
  }
  outcome.output = "\n";
  char part[4096];
  while (const std::size_t count = fread(part, 1, sizeof part, pipe)) outcome.output.append(part, count);
  const int status = pclose(pipe);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  EXPECT_NE(outcome.status, 124) << "hung; " << outcome.output;
  return outcome;
}

constexpr double kTimeoutSeconds = 4;  // the worker's
constexpr double kSlackSeconds = 10;   // for a busy machine
constexpr int kRanks = 3;

void expect_survivors(const Outcome& outcome, const std::string& words) {
  EXPECT_NE(outcome.status, 0) << outcome.output;
  for (int r = 0; r + 1 < kRanks; ++r) {
    EXPECT_THAT(outcome.of(r), HasSubstr(words)) << outcome.output;
    EXPECT_GT(outcome.seconds_of(r), 0);
    EXPECT_LT(outcome.seconds_of(r), kTimeoutSeconds + kSlackSeconds) << outcome.output;
  }
}

TEST(MpiFailure, AStoppedRankIsNamedByTheOthersWithinTheTimeout) {
  const Outcome outcome = run(kRanks, "stopped");
  expect_survivors(outcome, "rank 2 did not come to call");
}

TEST(MpiFailure, ARankStoppedInTheMidstOfTransfersIsNamedByTheOthersWithinTheTimeout) {
  const Outcome outcome = run(kRanks, "cut");
  expect_survivors(outcome, "rank 2 ");
  EXPECT_THAT(outcome.of(0), HasSubstr("within 4 s"));
}

TEST(MpiFailure, ARankThatHangsIsNamedByTheOthersWithinTheTimeout) {
  const Outcome outcome = run(kRanks, "stuck");
  expect_survivors(outcome, "rank 2 did not come to call 1 (barrier) within 4 s");
}

TEST(MpiFailure, ARankThatWaitsElsewhereForTheOneThatHangsIsNotBlamed) {
  const Outcome outcome = run(kRanks, "elsewhere");
  EXPECT_THAT(outcome.of(0), HasSubstr("rank 0: rank 2 did not come to call 0 (barrier)")) << outcome.output;
  EXPECT_THAT(outcome.of(1), HasSubstr("rank 1 (rank 2 of the world) did not come to call 0 (barrier)"))
      << outcome.output;
}

TEST(MpiFailure, MpiThatDoesNotStartIsSaidWithinTheTimeout) {
  const Outcome outcome = run(kRanks, "stopped-before-start");
  expect_survivors(outcome, "MPI did not start within 4 s");
}

TEST(MpiFailure, ARankThatStopsOnItsWayFromMpiIntoTheWorldIsNamed) {
  const Outcome outcome = run(kRanks, "stopped-before-duplicate");
  expect_survivors(outcome, "rank 2 did not come to make a communicator within 4 s");
}

TEST(MpiFailure, ARankThatGivesUpIsHeardByTheOthersAtOnce) {
  const Outcome outcome = run(kRanks, "gives-up");
  expect_survivors(outcome, "rank 2 gave up: out of luck");
}

TEST(MpiFailure, AKilledRankEndsTheJob) {
  const Outcome outcome = run(kRanks, "killed");
  EXPECT_NE(outcome.status, 0) << outcome.output;
  EXPECT_LT(outcome.seconds, kTimeoutSeconds + kSlackSeconds) << outcome.output;
}

TEST(MpiFailure, AWholeWorldIsFinalisedByWhoInitialisedIt) {
  const Outcome outcome = run(kRanks, "whole");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  for (int r = 0; r < kRanks; ++r) EXPECT_THAT(outcome.of(r), HasSubstr(": finalised")) << outcome.output;
}

TEST(MpiFailure, ARankThatWaitsLeavesItsCoreToOthers) {
  const Outcome outcome = run(2, "late");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  const std::string line = outcome.of(0);
  const auto used = line.find("used ");
  ASSERT_NE(used, std::string::npos) << outcome.output;
  EXPECT_LT(std::strtod(line.c_str() + used + 5, nullptr), 0.3) << "polling without rest would use a whole one";
}

TEST(MpiFailure, MpiThatIsNotInitialisedOrNotForThreadsIsAUsageError) {
  Outcome outcome = run(1, "not-initialised");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_THAT(outcome.of(0), HasSubstr("MPI is not initialised"));
  outcome = run(2, "single-threaded");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_THAT(outcome.of(1), AllOf(HasSubstr("MPI_THREAD_SINGLE"), HasSubstr("MPI_THREAD_MULTIPLE")));
}

}  // namespace
