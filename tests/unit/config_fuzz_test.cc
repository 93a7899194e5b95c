// Mutated configurations: each is read or refused by one line, whatever its bytes.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/base/random.h>
#include <ballast/engine/config.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "support/fuzz.h"

namespace ballast {
namespace {

TEST(ConfigFuzz, MutatedTextsAreReadOrRefusedByOneLine) {
  const char* given = std::getenv("BALLAST_SEED");
  const std::uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : 20240917;
  SCOPED_TRACE("repeat with BALLAST_SEED=" + std::to_string(seed) + " config_test --gtest_filter=ConfigFuzz.*");
  base::Random random(seed);
  const std::string original = Config{}.to_json();
  const std::string pieces[] = {"{",        "}",
                                "[",        "]",
                                ",",        ":",
                                "\"",       "\\",
                                "\\u0000",  "\xff",
                                "\n",       "null",
                                "1e400",    "-1",
                                "true",     "\"nan\"",
                                "\"auto\"", "1e-5",
                                "{}",       "\"1GiB\"",
                                "\xc3",     "//",
                                "0",        "e",
                                "\\u",      "\"optimizer\"",
                                "\xf0\x90", "9999999999999999999999"};
  int accepted = 0;
  int refused = 0;
  for (std::uint64_t round = 0; test::fuzz_goes_on(round, 20'000); ++round) {
    std::string text = original;
    for (std::uint64_t changes = 1 + random.below(4); changes > 0; --changes) {
      const std::size_t at = random.below(text.size() + 1);
      switch (random.below(5)) {
        case 0:
          text.insert(at, pieces[random.below(std::size(pieces))]);
          break;
        case 1:
          text.erase(at, 1 + random.below(20));
          break;
        case 2:
          text.resize(at);
          break;
        case 3:
          if (at < text.size()) text[at] = static_cast<char>(random.below(256));
          break;
        default:
          text.insert(at, text.substr(random.below(text.size() + 1), random.below(60)));
      }
    }
    try {
      const std::string once = Config::from_json(text, "fuzz").to_json();
      ASSERT_EQ(Config::from_json(once).to_json(), once) << text;
      ++accepted;
    } catch (const ConfigError& error) {
      const std::string what = error.what();
      for (const char c : what) ASSERT_TRUE(c >= 32 && c < 127) << "round " << round << ": " << what;
      ASSERT_LT(what.size(), 600u) << "round " << round;
      ASSERT_EQ(what.rfind("fuzz", 0), 0u) << what;
      ++refused;
    }
  }
  EXPECT_GT(accepted, 0);
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace ballast
