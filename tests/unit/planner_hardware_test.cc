// Hardware profiles: those that are shipped, what a strict reader refuses, and how a node is shared among its ranks.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/planner/hardware.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace ballast::planner {
namespace {

using ::testing::HasSubstr;

std::string folder() { return std::string(BALLAST_SOURCE_DIR) + "/configs/hardware"; }

std::string number(const std::string& key, const std::string& value, const std::string& unit) {
  return "\"" + key + "\": {\"value\": " + value + ", \"unit\": \"" + unit + "\", \"source\": \"a test\"}";
}

std::string least(const std::string& more = "") {
  return "{\"name\": \"least\", " + number("devices", "2", "devices") + ", " + number("device_memory", "1", "GiB") +
         ", " + number("host_memory", "2", "GB") + ", " + number("memory_rate", "10", "GB/s") + ", " +
         number("compute", "1", "TFLOP/s") + ", " + number("host_to_device", "4", "GB/s") + ", " +
         number("device_to_host", "4", "GB/s") + more + "}";
}

std::string refusal(const std::string& text) {
  try {
    HardwareProfile::from_json(text, "profile.json");
  } catch (const ConfigError& error) {
    return error.what();
  }
  ADD_FAILURE() << "taken: " << text;
  return "";
}

TEST(HardwareProfile, EveryShippedOneIsReadAndNamesItsSources) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder())) {
    const HardwareProfile profile = HardwareProfile::from_file(entry.path().string());
    EXPECT_FALSE(profile.name.empty()) << entry.path();
    EXPECT_GE(profile.sources.size(), 7u) << entry.path();
    EXPECT_GE(profile.peak, profile.compute) << entry.path();
    ++count;
  }
  EXPECT_GE(count, 6);
}

TEST(HardwareProfile, TheBuiltInOneIsTheShippedOneOfATwoCoreMachine) {
  std::ifstream in(folder() + "/two-core.json");
  const std::string shipped{std::istreambuf_iterator<char>(in), {}};
  EXPECT_EQ(std::string(two_core_profile_json()), shipped);
  EXPECT_EQ(two_core_profile().devices, 1);
}

// ZeRO-Infinity, figure 2b: 3 GB/s of copies and 1.6 GB/s of NVMe for each of 16 GPUs at once.
TEST(HardwareProfile, ANodesRanksShareItsLinks) {
  const HardwareProfile dgx2 = HardwareProfile::from_file(folder() + "/dgx-2.json");
  const RankRates all = rank_rates(dgx2, 512);
  EXPECT_EQ(all.nodes, 32);
  EXPECT_DOUBLE_EQ(all.step.host_to_device, 3e9);
  EXPECT_NEAR(all.step.nvme_read, 1.6e9, 0.05e9);
  EXPECT_DOUBLE_EQ(all.step.network, 70e9);
  const RankRates one = rank_rates(dgx2, 1);
  EXPECT_DOUBLE_EQ(one.step.host_to_device, 12e9);
  EXPECT_DOUBLE_EQ(one.step.nvme_read, 25e9);
  EXPECT_EQ(one.ranks_on_node, 1);
}

TEST(HardwareProfile, ValuesAreInTheUnitsTheyName) {
  const HardwareProfile profile = HardwareProfile::from_json(
      least(", " + number("nvme_read", "3000", "MB/s") + ", " + number("nvme_write", "2", "GiB/s") + ", " +
            number("nvme_latency", "80", "us") + ", " + number("nvme_endurance", "600", "TBW")));
  EXPECT_EQ(profile.device_memory, 1073741824.0);
  EXPECT_EQ(profile.nvme_read, 3e9);
  EXPECT_EQ(profile.nvme_write, 2147483648.0);
  EXPECT_DOUBLE_EQ(profile.nvme_latency, 80e-6);
  EXPECT_EQ(profile.nvme_endurance, 600e12);
  EXPECT_EQ(profile.nvme_duplex, 1) << "reads and writes take turns unless measured otherwise";
}

TEST(HardwareProfile, RefusalsNameTheFileTheKeyAndWhatWouldDo) {
  EXPECT_THAT(refusal(least(", " + number("nvme_raed", "1", "GB/s"))), HasSubstr("\"nvme_read\""));
  EXPECT_THAT(refusal(least(", " + number("nvme_raed", "1", "GB/s"))), HasSubstr("profile.json"));
  EXPECT_THAT(refusal(least(", " + number("network", "1", "GB"))), HasSubstr("\"GB/s\""));
  EXPECT_THAT(refusal(least(", \"network\": 5")), HasSubstr("\"source\""));
  EXPECT_THAT(refusal(least(", \"network\": {\"value\": 5, \"unit\": \"GB/s\"}")), HasSubstr("\"source\""));
  EXPECT_THAT(refusal(least(", \"network\": {\"value\": 5, \"unit\": \"GB/s\", \"source\": \"\"}")),
              HasSubstr("\"source\""));
  EXPECT_THAT(refusal(least(", \"network\": {\"valeu\": 5, \"unit\": \"GB/s\", \"source\": \"x\"}")),
              HasSubstr("\"value\""));
  EXPECT_THAT(refusal(least(", " + number("network", "-1", "GB/s"))), HasSubstr("\"network\""));
  EXPECT_THAT(refusal(least(", " + number("network", "\"fast\"", "GB/s"))), HasSubstr("\"network\""));
  EXPECT_THAT(refusal(least(", " + number("nvme_duplex", "3", "factor"))), HasSubstr("nvme_duplex"));
  EXPECT_THAT(refusal(least(", " + number("nvme_read", "3", "GB/s"))), HasSubstr("nvme_write"));
  EXPECT_THAT(refusal(least(", " + number("devices", "1", "devices"))), HasSubstr("devices"));
  EXPECT_THAT(refusal("{\"name\": \"x\"}"), HasSubstr("is missing"));
  EXPECT_THAT(refusal("[]"), HasSubstr("object"));
  EXPECT_THAT(refusal("{"), HasSubstr("profile.json"));
  EXPECT_THROW(HardwareProfile::from_file(folder() + "/no-such.json"), ConfigError);
}

TEST(HardwareProfile, MoreRanksThanDevicesNeedANetwork) {
  const HardwareProfile alone = HardwareProfile::from_json(least());
  EXPECT_NO_THROW(rank_rates(alone, 2));
  EXPECT_THROW(rank_rates(alone, 3), ConfigError);
  EXPECT_THROW(rank_rates(alone, 0), ConfigError);
}

}  // namespace
}  // namespace ballast::planner
