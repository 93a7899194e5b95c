// Sizes as people write them.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/size.h>
#include <gtest/gtest.h>

namespace ballast::base {
namespace {

TEST(Size, UnitsOfBothKindsAndWholeFractionsAreRead) {
  EXPECT_EQ(parse_size("0B"), 0u);
  EXPECT_EQ(parse_size("17 B"), 17u);
  EXPECT_EQ(parse_size("512MiB"), 512 * kMiB);
  EXPECT_EQ(parse_size("2GB"), 2'000'000'000u);
  EXPECT_EQ(parse_size("1GiB"), 1'073'741'824u);
  EXPECT_EQ(parse_size("1.5KiB"), 1536u);
  EXPECT_EQ(parse_size("0.001KB"), 1u);
  EXPECT_EQ(parse_size("3TiB"), 3072 * kGiB);
}

TEST(Size, WhatIsNoSizeIsRefused) {
  for (const char* text : {"",
                           "512",
                           "MiB",
                           "-1MiB",
                           "+1MiB",
                           "1.5B",
                           "1e3MiB",
                           "1.MiB",
                           ".5MiB",
                           "1 MiB ",
                           " 1MiB",
                           "1mib",
                           "1M",
                           "1G",
                           "1e9",
                           "1073741824",
                           "1.0.0MiB",
                           "99999999999999999999B",
                           "9223372036854775808B",
                           "8388608TiB",
                           "1.0000000001GiB",
                           "0x10B",
                           "1MiBB",
                           "NaNMiB"}) {
    EXPECT_FALSE(parse_size(text).has_value()) << text;
  }
  EXPECT_EQ(parse_size("9223372036854775807B"), static_cast<std::uint64_t>(INT64_MAX));
}

TEST(Size, PrintingIsForPeopleAndExactWhereWhole) {
  EXPECT_EQ(format_size(12), "12 B");
  EXPECT_EQ(format_size(317 * kKiB), "317 KiB");
  EXPECT_EQ(format_size(3 * kGiB / 2), "1.50 GiB");
  EXPECT_EQ(format_size(64 * kMiB), "64 MiB");
}

TEST(Size, RoundingIsExact) {
  EXPECT_EQ(round_up(513, 512), 1024u);
  EXPECT_EQ(round_up(4095, 4096), 4096u);
  EXPECT_EQ(round_up(0, 4096), 0u);
  EXPECT_EQ(round_down(8191, 4096), 4096u);
  EXPECT_EQ(ceil_div(28'824'000, 4096), 28'827'648u / 4096);
}

}  // namespace
}  // namespace ballast::base
