// `ballast tune`: what it writes, what it refuses, and that it leaves nothing behind. Which point is the fastest is for
// tune_test.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "command_runner.h"

namespace ballast::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Json = nlohmann::json;

TEST(Tune, MeasuresEachPathAndAllTogetherAndLeavesNothing) {
  const ScratchFolder scratch;
  const std::string a = scratch.path() + "/a", b = scratch.path() + "/b", file = scratch.path() + "/json";
  const CommandResult result =
      run_command({"tune", "--nvme", a, b, "--size", "256MiB", "--seconds", "1", "--json", file});
  ASSERT_EQ(result.status, 0) << result.error;
  EXPECT_THAT(result.error, IsEmpty());
  const Json json = Json::parse(read_file(file), nullptr, false);
  ASSERT_FALSE(json.is_discarded());
  ASSERT_EQ(json["paths"].size(), 2u);
  EXPECT_EQ(json["paths"][0]["path"], a);
  EXPECT_EQ(json["paths"][1]["path"], b);
  for (const Json& rates : {json["paths"][0], json["paths"][1], json["together"]}) {
    for (const char* way : {"read", "write", "mixed"}) EXPECT_GT(rates[way]["bytes_per_second"], 0) << way;
    EXPECT_GT(rates["duplex_factor"], 0);
  }
  EXPECT_GT(json["adam"]["parameters_per_second"], 0);
  EXPECT_GT(json["copy"]["memory_bytes_per_second"], 0);
  EXPECT_TRUE(json["clear"].is_boolean());
  bool measured = false;  // the choice is one of the points that the search has seen
  for (const Json& point : json["search"])
    measured = measured || (point["block_size"] == json["block_size"] && point["queue_depth"] == json["queue_depth"]);
  EXPECT_TRUE(measured);
  EXPECT_THAT(scratch.entries(), ElementsAre("json"));
}

TEST(Tune, RefusesWhatItCannotMeasure) {
  const ScratchFolder scratch;
  const auto refused = [&](const std::vector<std::string>& more, const std::string& what) {
    std::vector<std::string> arguments = {"tune"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const CommandResult result = run_command(arguments);
    EXPECT_EQ(result.status, 2) << result.error;
    EXPECT_THAT(result.error, HasSubstr(what));
  };
  refused({}, "--nvme");
  refused({"--nvme", scratch.path(), "--size", "1MiB"}, "at least 256");
  refused({"--nvme", scratch.path(), "--size", "many"}, "--size");
  refused({"--nvme", scratch.path(), "--seconds", "0"}, "--seconds");
  refused({"--nvme", scratch.write("file", "")}, "file");
  refused({"--nvme", scratch.path(), "--json", scratch.path() + "/absent/out"}, "absent");
}

}  // namespace
}  // namespace ballast::testing
