// Forcing an instruction set.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "ballast/kernels/targets.h"

namespace ballast::kernels {
namespace {

TEST(Targets, TheFirstSupportedOneRunsUnlessAnotherIsForced) {
  const std::vector<std::string> targets = supported_targets();
  ASSERT_FALSE(targets.empty());
  EXPECT_EQ(active_target(), targets.front());
}

TEST(Targets, NamesAreDistinct) {
  const std::vector<std::string> targets = supported_targets();
  EXPECT_EQ(std::set<std::string>(targets.begin(), targets.end()).size(), targets.size());
}

TEST(Targets, EachSupportedOneCanBeForcedAndRuns) {
  const std::vector<std::string> targets = supported_targets();
  for (const std::string& target : targets) {
    EXPECT_TRUE(force_target(target));
    EXPECT_EQ(supported_targets(), targets) << "forcing changes what runs, not what is there";
    EXPECT_EQ(active_target(), target) << "asking what is there does not change what runs";
  }
  EXPECT_TRUE(force_target(""));
  EXPECT_EQ(active_target(), targets.front());
}

TEST(Targets, AnUnknownNameIsRefusedAndChangesNothing) {
  const std::string target = supported_targets().back();
  ASSERT_TRUE(force_target(target));
  EXPECT_FALSE(force_target("AVX1024"));
  EXPECT_FALSE(force_target("avx2"));
  EXPECT_EQ(active_target(), target);
  EXPECT_TRUE(force_target(""));
}

}  // namespace
}  // namespace ballast::kernels
