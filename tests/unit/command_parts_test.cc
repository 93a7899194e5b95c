// The parts of the command that need no training: output files, figures of a run, raw storage rates.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/base/random.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>

#include "cli/display.h"
#include "cli/output_file.h"
#include "cli/run_record.h"
#include "cli/storage_bench.h"
#include "integration/command_runner.h"

namespace ballast::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::read_file;
using testing::ScratchFolder;

TEST(Display, RatesArePrintedInGigabytesOfAThousandMillionBytes) {
  EXPECT_EQ(rate_text(1024.0 * 1024 * 1024 / 0.5), "2.15 GB/s");  // 2.0 GiB/s
  EXPECT_EQ(rate_text(1e9), "1.00 GB/s");
}

TEST(OutputFile, AppearsWholeOrNotAtAll) {
  const ScratchFolder scratch;
  const std::string path = scratch.write("out", "old");
  {
    OutputFile file(path);
    EXPECT_EQ(read_file(path), "old");
  }
  EXPECT_EQ(read_file(path), "old");
  EXPECT_THAT(scratch.entries(), ElementsAre("out"));
  {
    OutputFile file(path);
    file.publish("new");
    EXPECT_EQ(read_file(path), "new");
  }
  EXPECT_EQ(read_file(path), "new");
  EXPECT_THAT(scratch.entries(), ElementsAre("out"));
}

TEST(OutputFile, ALinkToAFileStaysALink) {
  const ScratchFolder scratch;
  scratch.write("target", "old");
  std::filesystem::create_symlink("target", scratch.path() + "/link");
  OutputFile(scratch.path() + "/link").publish("new");
  EXPECT_TRUE(std::filesystem::is_symlink(scratch.path() + "/link"));
  EXPECT_EQ(read_file(scratch.path() + "/target"), "new");
  EXPECT_EQ(scratch.entries().size(), 2u);
}

TEST(OutputFile, PathsThatCannotBeWrittenAreRefusedAtOnce) {
  const ScratchFolder scratch;
  EXPECT_THROW(OutputFile(scratch.path()), ConfigError);
  EXPECT_THROW(OutputFile(scratch.path() + "/absent/out"), ConfigError);
  EXPECT_THAT(scratch.entries(), IsEmpty());
  OutputFile nothing("");
  EXPECT_FALSE(nothing.wanted());
  nothing.publish("x");
  OutputFile null("/dev/null");
  null.publish("x");
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
}

// Standard output led to a file for a while, as by a shell.
class RedirectedOutput {
 public:
  explicit RedirectedOutput(const std::string& path) : before_(::dup(STDOUT_FILENO)) {
    std::fflush(stdout);
    const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    EXPECT_EQ(::dup2(file, STDOUT_FILENO), STDOUT_FILENO);
    ::close(file);
  }
  ~RedirectedOutput() {
    std::fflush(stdout);
    ::dup2(before_, STDOUT_FILENO);
    ::close(before_);
  }

 private:
  int before_;
};

TEST(OutputFile, WhatGoesToRedirectedStandardOutputComesAfterWhatIsThere) {
  const ScratchFolder scratch;
  const std::string path = scratch.path() + "/all";
  for (const std::string& name : {std::string("/dev/stdout"), std::string("/dev/fd/1"), path}) {
    {
      const RedirectedOutput redirected(path);
      OutputFile file(name);
      LineLog log(name);
      std::printf("a table\n");
      log.append("a line");
      std::printf("more\n");
      file.publish("{}\n");
      std::printf("an end\n");
    }
    EXPECT_EQ(read_file(path), "a table\na line\nmore\n{}\nan end\n") << name;
    EXPECT_THAT(scratch.entries(), ElementsAre("all"));
  }
}

TEST(OutputFile, ADescriptorTakesTheFileThatWasWrittenOnTheWay) {
  const ScratchFolder scratch;
  const std::string path = scratch.write("three", "");
  const int three = ::open(path.c_str(), O_WRONLY | O_APPEND);
  {
    OutputFile file("/proc/self/fd/" + std::to_string(three));
    EXPECT_EQ(::write(three, "before\n", 7), 7);
    std::ofstream(file.temporary_path()) << "trace\n";
    file.publish();
  }
  ::close(three);
  EXPECT_EQ(read_file(path), "before\ntrace\n");
  const int reading = ::open(path.c_str(), O_RDONLY);
  EXPECT_THROW(OutputFile("/dev/fd/" + std::to_string(reading)), ConfigError);
  ::close(reading);
}

TEST(OutputFile, ADeviceOrAPipeIsWrittenInPlace) {
  const ScratchFolder scratch;
  const std::string pipe = scratch.path() + "/pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const int reader = ::open(pipe.c_str(), O_RDONLY | O_NONBLOCK);
  OutputFile(pipe).publish("through\n");
  char text[32] = {};
  EXPECT_EQ(::read(reader, text, sizeof text), 8);
  EXPECT_STREQ(text, "through\n");
  ::close(reader);
  EXPECT_THAT(scratch.entries(), ElementsAre("pipe"));
}

TEST(OutputFile, RedirectedStandardOutputMayBeNamedTwice) {
  const ScratchFolder scratch;
  const std::string path = scratch.path() + "/all";
  const RedirectedOutput redirected(path);
  EXPECT_NO_THROW(require_distinct({{"--json", "/dev/stdout"}, {"--log", "/dev/stdout"}}, {}));
}

TEST(LineLog, CutsATornLineOfAnyLengthAndKeepsWholeOnes) {
  const ScratchFolder scratch;
  for (const std::size_t torn : {0, 1, 4095, 4096, 4097, 20'000}) {
    for (const std::string whole : {"", "first\nsecond\n"}) {
      const std::string path = scratch.write("log", whole + std::string(torn, 'x'));
      LineLog(path).append("added");
      EXPECT_EQ(read_file(path), whole + "added\n") << torn;
    }
  }
}

TEST(LineLog, AFileThatStaysEmptyIsRemovedAgain) {
  const ScratchFolder scratch;
  { const LineLog log(scratch.path() + "/log"); }
  EXPECT_THAT(scratch.entries(), IsEmpty());
  scratch.write("log", "");
  { const LineLog log(scratch.path() + "/log"); }
  EXPECT_THAT(scratch.entries(), ElementsAre("log"));
  EXPECT_THROW(LineLog(scratch.path()), ConfigError);
}

RunRecord record_of(std::size_t steps, double seconds) {
  RunRecord record;
  record.tokens_per_step = 24;
  record.steps.assign(steps, {2.5, 1.0, seconds});
  record.end.parameters = 100;
  record.timed = {.steps = steps, .seconds = static_cast<double>(steps) * seconds};
  return record;
}

TEST(RunRecord, WarmUpAndLeadInStepsDoNotCountWhereThereAreMore) {
  EXPECT_EQ(warm_up_steps(0), 0u);
  EXPECT_EQ(warm_up_steps(1), 0u);
  EXPECT_EQ(warm_up_steps(2), 1u);
  EXPECT_EQ(warm_up_steps(3), 2u);
  EXPECT_EQ(warm_up_steps(100), 2u);
  EXPECT_EQ(lead_in_steps(0), 0u);
  EXPECT_EQ(lead_in_steps(4), 0u);
  EXPECT_EQ(lead_in_steps(5), 2u);
  RunRecord record = record_of(5, 1.0);
  record.steps[0].seconds = record.steps[1].seconds = 1000;
  EXPECT_EQ(record.steady_step_seconds(), 1.0);
  EXPECT_EQ(record.tokens_per_second(), 24.0);
}

TEST(RunRecord, MeasuringTheDrivesTakesLittleMemoryWhateverIsAskedFor) {
  for (const std::size_t paths : {1, 2, 7, 1000})
    for (const std::uint64_t block : {std::uint64_t{4} << 10, std::uint64_t{1} << 20, std::uint64_t{1} << 30})
      for (const std::uint32_t depth : {1, 32, 4096}) {
        const RateRequests given = rate_requests(paths, {block, depth});
        ASSERT_GE(given.queue_depth, 1u);
        ASSERT_GT(given.block_bytes, 0u);
        EXPECT_EQ(given.block_bytes % 4096, 0u);
        EXPECT_LE(given.block_bytes * 2 * (given.queue_depth + 1) * paths, kRateMemoryBytes)
            << paths << " " << block << " " << depth;
      }
  const RateRequests usual = rate_requests(1, {std::uint64_t{1} << 20, 32});
  EXPECT_EQ(usual.block_bytes, std::uint64_t{1} << 20);
  EXPECT_EQ(usual.queue_depth, 32u);
}

TEST(RunRecord, TheTimedStepsOfSeveralWindowsAddUp) {
  Report begin, end;
  begin.lanes[1].bytes = 100;
  end.lanes[1].bytes = 400;
  begin.lanes[2].busy_ns = 1'000'000'000;
  end.lanes[2].busy_ns = 5'000'000'000;
  RunRecord record;
  EXPECT_TRUE(std::isnan(record.steady_step_seconds()));
  record.timed.add(begin, end, 3, 6.0);
  record.timed.add(begin, end, 1, 4.0);
  EXPECT_EQ(record.timed.lanes[1].bytes, 600u);
  EXPECT_EQ(record.steady_step_seconds(), 2.5);
  EXPECT_EQ(record.bound_seconds(static_cast<Lane>(2)), 2.0);
}

TEST(RunRecord, TheBoundIsTheSlowestLaneAndNvmeCountsInTurnUnlessDuplex) {
  RunRecord record = record_of(6, 0.5);
  const auto lane = [&](Lane which) -> LaneReport& { return record.end.lanes[static_cast<std::size_t>(which)]; };
  lane(Lane::nvme_read).bytes = 4 * 1400;
  lane(Lane::nvme_write).bytes = 4 * 1200;
  lane(Lane::compute).busy_ns = 4 * 100'000'000;
  record.timed = {};
  record.timed.add(record.steady_begin, record.end, 4, 4 * 0.5);
  record.rates =
      StorageRates{.read_bytes_per_second = 7000, .write_bytes_per_second = 6000, .mixed_bytes_per_second = 6500};
  EXPECT_DOUBLE_EQ(record.bytes_per_step(Lane::nvme_read), 1400);
  EXPECT_DOUBLE_EQ(record.nvme_bound_seconds(), 0.4);
  EXPECT_DOUBLE_EQ(record.bound_seconds(Lane::compute), 0.1);
  EXPECT_DOUBLE_EQ(record.efficiency(), 0.8);
  EXPECT_EQ(record.bounding_lane(), "nvme");
  record.rates->mixed_bytes_per_second = 13'000;
  EXPECT_DOUBLE_EQ(record.nvme_bound_seconds(), 0.2);
  lane(Lane::compute).busy_ns = 4 * 450'000'000;
  record.timed = {};
  record.timed.add(record.steady_begin, record.end, 4, 4 * 0.5);
  EXPECT_DOUBLE_EQ(record.efficiency(), 0.9);
  EXPECT_EQ(record.bounding_lane(), "compute");
}

TEST(RunRecord, JsonHoldsNullWhereANumberIsNotFinite) {
  RunRecord record = record_of(1, 0.0);
  record.steps[0].loss = std::numeric_limits<double>::quiet_NaN();
  record.steps[0].grad_norm = std::numeric_limits<double>::infinity();
  record.end.lanes[0].bytes = 10;
  const std::string text = to_json(record).dump();
  EXPECT_THAT(text, HasSubstr("\"losses\":[null]"));
  EXPECT_THAT(text, HasSubstr("\"grad_norms\":[null]"));
  EXPECT_THAT(text, HasSubstr("\"tokens_per_second\":null"));
  EXPECT_THAT(text, HasSubstr("\"efficiency\":null"));
}

TEST(RunRecord, LossesArePrintedSoThatTheyRoundTrip) {
  RunRecord record = record_of(1, 1.0);
  record.steps[0].loss = 0.1 + 0.2;
  EXPECT_EQ(nlohmann::json::parse(to_json(record).dump())["losses"][0].get<double>(), 0.1 + 0.2);
}

class StorageBenchOn : public ::testing::TestWithParam<io::Backend> {
 protected:
  void SetUp() override {
    if (GetParam() == io::Backend::io_uring && !io::io_uring_unavailable_reason().empty())
      GTEST_SKIP() << "no io_uring here: " << io::io_uring_unavailable_reason();
  }
};

TEST_P(StorageBenchOn, EveryPassMovesTheWholeFilesAndLeavesNothing) {
  const ScratchFolder scratch;
  {
    StorageBench bench({.paths = {scratch.path() + "/a/b", scratch.path() + "/c"},
                        .bytes_per_path = 37 * 65536,
                        .block_bytes = 65536,
                        .queue_depth = 5,
                        .backend = GetParam()});
    EXPECT_EQ(bench.prepare().bytes, 2 * 37 * 65536u);
    EXPECT_GE(bench.flush_seconds(), 0);
    using Pattern = StorageBench::Pattern;
    for (const Pattern pattern : {Pattern::read, Pattern::write, Pattern::rewrite, Pattern::read}) {
      const auto result = bench.run(pattern);
      EXPECT_EQ(result.bytes, (pattern == Pattern::rewrite ? 4 : 2) * 37 * 65536u);
      EXPECT_GT(result.bytes_per_second(), 0);
    }
  }
  EXPECT_THAT(scratch.entries(), IsEmpty());
}

TEST_P(StorageBenchOn, APassThatRunsOutOfTimeEndsEarlyAndLaterOnesReadOnlyWhatWasWritten) {
  const ScratchFolder scratch;
  StorageBench bench({.paths = {scratch.path()},
                      .bytes_per_path = std::uint64_t{1} << 30,
                      .block_bytes = 4096,
                      .queue_depth = 2,
                      .backend = GetParam(),
                      .pass_seconds_max = 0.02});
  const auto prepared = bench.prepare();
  EXPECT_GT(prepared.bytes, 0u);
  EXPECT_LT(prepared.bytes, std::uint64_t{1} << 30);
  EXPECT_GT(bench.run(StorageBench::Pattern::read).bytes, 0u);
  EXPECT_GT(bench.run(StorageBench::Pattern::rewrite).bytes, 0u);
}

TEST_P(StorageBenchOn, ARewriteOfAFileThatIsThereLeavesItsContentsAsTheyWere) {
  const ScratchFolder scratch;
  const std::string name = scratch.path() + "/states";
  std::string contents(41 * 65536 + 777, '\0');
  base::Random random(7);
  for (char& c : contents) c = static_cast<char>(random.next());
  std::ofstream(name, std::ios::binary) << contents;
  {
    StorageBench bench(
        {.files = {name}, .block_bytes = 65536, .queue_depth = 3, .backend = GetParam(), .run_blocks = 4});
    EXPECT_EQ(bench.run(StorageBench::Pattern::rewrite).bytes, 2 * 41 * 65536u);
    EXPECT_EQ(bench.run(StorageBench::Pattern::read).bytes, 41 * 65536u);
  }
  std::ifstream in(name, std::ios::binary);
  const std::string after((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  EXPECT_TRUE(after == contents);
}

TEST(BlockOrder, ARewriteReadsEachBlockOnceThenWritesItWithEnoughReadAheadForAFullQueue) {
  for (std::uint64_t blocks = 1; blocks <= 40; ++blocks) {
    for (std::uint64_t run = 1; run <= 5; ++run) {
      for (std::uint64_t depth = 1; depth <= 7; ++depth) {
        const BlockOrder order(BlockOrder::Pattern::rewrite, blocks, run, depth);
        const std::uint64_t buffers = BlockOrder::buffers(run, depth);
        std::vector<std::int64_t> read_at(blocks, -1), written_at(blocks, -1);
        ASSERT_EQ(order.moves(), 2 * blocks);
        for (std::uint64_t i = 0; i < order.moves(); ++i) {
          const BlockOrder::Move move = order.at(i);
          const auto now = static_cast<std::int64_t>(i);
          ASSERT_LT(move.block, blocks) << blocks << ' ' << run << ' ' << depth << ' ' << i;
          if (move.write) {
            ASSERT_EQ(written_at[move.block], -1);
            ASSERT_GE(read_at[move.block], 0);
            // Its read has left the queue when it is asked for, unless nothing else is left to do.
            if (move.block + buffers < blocks) {
              ASSERT_GE(now - read_at[move.block], static_cast<std::int64_t>(depth));
            }
            written_at[move.block] = now;
          } else {
            ASSERT_EQ(read_at[move.block], -1);
            if (move.block >= buffers) {
              ASSERT_GE(written_at[move.block - buffers], 0) << blocks << ' ' << run << ' ' << depth << ' ' << i;
              ASSERT_GE(now - written_at[move.block - buffers], static_cast<std::int64_t>(depth));
            }
            read_at[move.block] = now;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, StorageBenchOn, ::testing::Values(io::Backend::io_uring, io::Backend::threads),
                         [](const auto& each) { return each.param == io::Backend::io_uring ? "io_uring" : "threads"; });

}  // namespace
}  // namespace ballast::cli
