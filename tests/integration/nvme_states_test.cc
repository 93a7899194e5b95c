// States on NVMe as the engine keeps them: every element and bit pattern comes back whatever the sizes, the dtypes and
// the memory between; and less memory is taken than where they lie in it.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <fstream>
#include <limits>
#include <numeric>

#include "support/on_ranks.h"
#include "support/random_case.h"
#include "support/sanitizers.h"

namespace ballast::testing {
namespace {

using ::testing::HasSubstr;

constexpr Timing kTiming = Timing::just_in_time;

std::vector<std::byte> bytes_of(const Tensor& tensor) {
  const auto* const data = static_cast<const std::byte*>(tensor.data);
  return {data, data + static_cast<std::size_t>(tensor.elements) * element_bytes(tensor.dtype)};
}

// What a pass sees of each parameter of each unit, in order.
std::vector<std::vector<std::byte>> seen_in_a_pass(Engine& engine, const std::vector<SyntheticUnit>& model) {
  std::vector<std::vector<std::byte>> seen;
  auto pass = engine.begin_pass({.kind = Pass::evaluate});
  for (std::uint32_t u = 0; u < model.size(); ++u) {
    auto lease = engine.acquire({u}, engine.stream());
    lease.wait();
    for (std::uint32_t p = 0; p < model[u].parameters.size(); ++p) seen.push_back(bytes_of(lease[{u, p}]));
    lease.release(engine.stream());
  }
  return seen;
}

void add_units(Engine& engine, const std::vector<SyntheticUnit>& model) {
  for (const SyntheticUnit& unit : model) engine.add_unit(unit.name, unit.parameters);
}

// Every one of 2^16 patterns: NaN payloads, infinities, denormals, -0.
std::vector<float> every_pattern(DataType type) {
  std::vector<float> values;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    if (type == DataType::bf16) {
      values.push_back(bf16_value(static_cast<std::uint16_t>(bits)));
      continue;
    }
    const std::uint32_t sign = (bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3FF;
    if (exponent == 31) {
      values.push_back(std::bit_cast<float>(sign | 0x7F800000 | fraction << 13));
    } else if (exponent > 0) {
      values.push_back(std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13));
    } else {
      const float magnitude = std::ldexp(static_cast<float>(fraction), -24);
      values.push_back(sign != 0 ? -magnitude : magnitude);
    }
  }
  return values;
}

// Signalling NaNs become quiet; nothing else changes.
std::uint32_t quiet(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return (bits & 0x7FFFFFFF) > 0x7F800000 ? bits | 0x00400000 : bits;
}
std::uint32_t quiet(std::uint32_t bits, DataType type) {
  const std::uint32_t infinity = type == DataType::bf16 ? 0x7F80 : 0x7C00;
  return (bits & 0x7FFF) > infinity ? bits | (type == DataType::bf16 ? 0x40 : 0x200) : bits;
}

class NvmeStates : public ::testing::Test {
 protected:
  const Watchdog watchdog_{100};
  const TemporaryDirectory directory_;
};

// Around sectors and pages; and one whose length ends 448 bytes behind both.
TEST_F(NvmeStates, EveryElementCountComesBackTimeAndAgain) {
  std::vector<SyntheticUnit> model;
  for (const DataType type : {DataType::bf16, DataType::fp32}) {
    for (const std::int64_t count : {1, 255, 256, 257, 2047, 2048, 2049}) {
      model.push_back({std::string(to_string(type)) + std::to_string(count), {{"w", {count}, {.dtype = type}}}});
    }
  }
  model.push_back({"large", {{"w", {14'412'000}, {.trainable = false}}}});
  Config config = plain_config(directory_.path(), Tier::nvme, kTiming);
  config.budget.host_bytes = std::uint64_t{16} << 20;
  Engine engine(config);
  add_units(engine, model);
  engine.commit();
  const auto value = [](std::uint32_t unit, std::int64_t element) {
    return static_cast<float>((element * 31 + unit) % 251) - 125;
  };
  engine.initialize([&](ParameterId id, std::int64_t first, std::span<float> values) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = value(id.unit, first + static_cast<std::int64_t>(i));
  });
  const auto first = seen_in_a_pass(engine, model);
  for (std::uint32_t u = 0; u < model.size(); ++u) {
    const std::int64_t count = model[u].parameters[0].shape[0];
    const bool narrow = model[u].parameters[0].options.dtype != DataType::fp32;
    ASSERT_EQ(first[u].size(), static_cast<std::size_t>(count) * (narrow ? 2 : 4));
    for (std::int64_t i = 0; i < count; ++i) {
      float seen = 0;
      if (narrow) {
        std::uint16_t bits = 0;
        std::memcpy(&bits, first[u].data() + i * 2, 2);
        seen = bf16_value(bits);
      } else {
        std::memcpy(&seen, first[u].data() + i * 4, 4);
      }
      ASSERT_EQ(seen, value(u, i)) << model[u].name << " element " << i;
    }
  }
  for (int pass = 0; pass < 2; ++pass) EXPECT_EQ(seen_in_a_pass(engine, model), first);
  // Into memory of whatever alignment.
  for (const std::size_t offset : {1, 16, 129}) {
    std::vector<float> memory(offset + 2049, -1);
    engine.read({13, 0}, 0, std::span(memory).subspan(offset));
    EXPECT_EQ(memory[offset - 1], -1);
    for (std::int64_t i = 0; i < 2049; ++i) ASSERT_EQ(memory[offset + static_cast<std::size_t>(i)], value(13, i));
  }
}

TEST_F(NvmeStates, EveryBitPatternOfSixteenBitTypesIsKeptInTwoBytes) {
  std::vector<SyntheticUnit> model;
  std::vector<std::vector<float>> values;
  for (const DataType type : {DataType::bf16, DataType::fp16}) {
    for (const bool trainable : {false, true}) {
      model.push_back({std::string(to_string(type)) + (trainable ? " trained" : " frozen"),
                       {{"w", {0x10000}, {.dtype = type, .trainable = trainable}}}});
      values.push_back(every_pattern(type));
    }
  }
  std::vector<std::vector<std::vector<std::byte>>> seen;
  std::vector<std::uint64_t> stored;
  for (const Tier tier : {Tier::nvme, Tier::host, Tier::device}) {
    Engine engine(plain_config(directory_.path(), tier, kTiming));
    add_units(engine, model);
    engine.commit();
    engine.initialize([&](ParameterId id, std::int64_t first, std::span<float> out) {
      std::memcpy(out.data(), values[id.unit].data() + first, out.size_bytes());
    });
    seen.push_back(seen_in_a_pass(engine, model));
    EXPECT_EQ(seen_in_a_pass(engine, model), seen.back());
    EXPECT_EQ(seen.back(), seen.front()) << to_string(tier);
    stored.push_back(engine.report().nvme_stored_bytes);
    for (std::uint32_t u = 0; u < model.size(); ++u) {
      std::vector<float> back(0x10000);
      engine.read({u, 0}, 0, back);
      for (std::size_t i = 0; i < back.size(); ++i) {
        ASSERT_EQ(quiet(back[i]), quiet(values[u][i])) << model[u].name << " pattern " << i;
      }
    }
  }
  // The patterns themselves, as 16 bits each.
  for (std::uint32_t u = 0; u < model.size(); ++u) {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
      std::uint16_t there = 0;
      std::memcpy(&there, seen.front()[u].data() + std::size_t{bits} * 2, 2);
      ASSERT_EQ(there, quiet(bits, *model[u].parameters[0].options.dtype)) << model[u].name;
    }
  }
  // 2 and an exact rest of 2 (frozen bf16), 2 (frozen fp16), 12 (bf16), 14 (fp16 with its fp32 master).
  EXPECT_LE(stored.front(), std::uint64_t{0x10000} * (4 + 12 + 2 + 14) + 8 * 4096);
  EXPECT_GE(stored.front(), std::uint64_t{0x10000} * (4 + 12 + 2 + 14));
}

// 0.1, -0.2, 0.3, -0.4, 0.5 from 1 at a rate of 0.01: 0.990325736470 in double.
TEST_F(NvmeStates, EveryPairOfTiersOnOneRankOrTwoGivesTheSameBits) {
  std::vector<float> all;
  for (const int ranks : {1, 2}) {
    for (const Tier parameters : {Tier::device, Tier::host, Tier::nvme}) {
      for (const Tier optimizer : {Tier::device, Tier::host, Tier::nvme}) {
        Config config = plain_config(directory_.path(), parameters, kTiming);
        config.placement.optimizer = optimizer;
        config.optimizer.learning_rate = 0.01;
        config.optimizer.beta2 = 0.999;
        config.optimizer.weight_decay = 0;
        config.precision.parameters = DataType::fp32;
        std::vector<float> values(static_cast<std::size_t>(ranks));
        on_ranks(ranks, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
          EngineEnvironment environment;
          environment.communicator = communicator;
          Engine engine(config, environment);
          const std::vector<ParameterSpec> specs = {{"w", {5000}}};
          const UnitId unit = engine.add_unit("u", specs);
          engine.commit();
          engine.initialize(
              [](ParameterId, std::int64_t, std::span<float> out) { std::fill(out.begin(), out.end(), 1.0F); });
          for (const float gradient : {0.1F, -0.2F, 0.3F, -0.4F, 0.5F}) {
            auto step = engine.begin_step();
            {
              auto pass = step.begin_pass();
              contribute(engine, unit, specs, [&](std::uint32_t) { return gradient; });
            }
            step.finish_backward();
            step.update();
          }
          values[static_cast<std::size_t>(rank)] = read_one(engine, {0, 0}, 4999);
        });
        all.insert(all.end(), values.begin(), values.end());
      }
    }
  }
  EXPECT_EQ(all.size(), 27U);
  EXPECT_NEAR(all.front(), 0.990325736470, 2.4e-7);
  for (const float value : all) EXPECT_EQ(value, all.front());
}

TEST_F(NvmeStates, UnitsOfAThousandSmallParametersMoveThroughAQueueOfOne) {
  for (const int count : {1024, 1025, 1500}) {
    SCOPED_TRACE(count);
    std::vector<ParameterSpec> parameters;
    for (int i = 0; i < count; ++i) parameters.push_back({std::to_string(i), {1024}, {.dtype = DataType::fp32}});
    Config config = plain_config(directory_.path(), Tier::nvme, kTiming);
    config.nvme.queue_depth = 1;
    config.nvme.block_bytes = 64 << 10;
    config.optimizer.weight_decay = 0;
    config.optimizer.learning_rate = 0.01;
    Engine engine(config);
    const UnitId unit = engine.add_unit("u", parameters);
    engine.commit();
    engine.initialize([](ParameterId, std::int64_t, std::span<float> out) { std::fill(out.begin(), out.end(), 1.0F); });
    for (int s = 0; s < 2; ++s) {
      auto step = engine.begin_step();
      {
        auto pass = step.begin_pass();
        contribute(engine, unit, parameters, [](std::uint32_t p) { return p % 2 == 0 ? 0.1F : -0.1F; });
      }
      step.finish_backward();
      step.update();
    }
    for (const std::uint32_t p : {0U, 1U, 511U, 1023U, static_cast<std::uint32_t>(count) - 1}) {
      EXPECT_NEAR(read_one(engine, {0, p}, p % 1024), p % 2 == 0 ? 0.98 : 1.02, 3e-7) << p;
    }
  }
}

// Larger than any block; refused with its name or its numbers, or right, never half.
TEST_F(NvmeStates, AParameterLargerThanEveryBufferIsSplitOrRefusedAtOnce) {
  Case one;
  one.model = {{"u", {{"large", {1'000'003}, {.dtype = DataType::fp32}}}}};
  one.type = "adamw";
  Config config = plain_config(directory_.path(), Tier::device, kTiming);
  const Outcome expected = run_case(one, config, {});
  config = plain_config(directory_.path(), Tier::nvme, kTiming);
  config.nvme.block_bytes = 64 << 10;
  config = smallest(one, config);
  EXPECT_LT(config.budget.host_bytes, 64U << 20);
  const Outcome least = run_case(one, config, {});
  EXPECT_EQ(least.losses, expected.losses);
  EXPECT_EQ(least.values, expected.values);
  config.budget.host_bytes -= 4096;
  EXPECT_THAT(text_of<PlanError>([&] { run_case(one, config, {}); }), HasSubstr("smallest budget.host: "));
}

// The first unit's parameters at three accesses, none released: served, or refused with numbers; no standing still.
TEST_F(NvmeStates, ThreeUnitsOfSevenParametersHeldAtOnceAreServedOrRefused) {
  Case one;
  for (int u = 0; u < 5; ++u) {
    SyntheticUnit unit{"u" + std::to_string(u), {}};
    for (int p = 0; p < 7; ++p) unit.parameters.push_back({std::to_string(p), {1000 + p}});
    one.model.push_back(unit);
  }
  one.type = "adamw";
  const Config least = smallest(one, plain_config(directory_.path(), Tier::nvme, kTiming));
  int served = 0, refused = 0;
  for (const std::uint64_t more : {std::uint64_t{0}, std::uint64_t{32} << 20}) {
    Config config = least;
    config.budget.host_bytes += more;
    config.budget.device_bytes += more;
    Engine engine(config);
    SyntheticTrainer trainer(engine, one.model);
    engine.commit();
    trainer.initialize();
    trainer.step();
    try {
      auto pass = engine.begin_pass({.kind = Pass::evaluate});
      std::vector<ParameterLease> held;
      for (std::uint32_t u = 0; u < 3; ++u) held.push_back(engine.acquire({u}, engine.stream()));
      for (std::uint32_t u = 0; u < 3; ++u) {
        held[u].wait();
        EXPECT_EQ((held[u][{u, 6}].elements), 1006);
      }
      ++served;
    } catch (const PlanError& error) {
      EXPECT_THAT(error.what(), HasSubstr("KiB"));
      ++refused;
    }
    trainer.step();
  }
  EXPECT_GE(served, 1);
  EXPECT_EQ(served + refused, 2);
}

std::uint64_t resident_bytes() {
  std::ifstream status("/proc/self/status");
  std::uint64_t bytes = 0;
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmRSS:") || line.starts_with("HugetlbPages:")) {
      bytes += std::stoull(line.substr(line.find(':') + 1)) << 10;
    }
  }
  return bytes;
}

// 8 Mi parameters: 96 MiB of states.
TEST_F(NvmeStates, LessMemoryIsTakenThanWhereTheyLieInTheHost) {
  std::vector<SyntheticUnit> model;
  for (int u = 0; u < 16; ++u) model.push_back({"u" + std::to_string(u), {{"w", {1 << 19}}}});
  std::uint64_t grown[2] = {}, peak_host[2] = {}, peak_device[2] = {};
  for (const Tier tier : {Tier::nvme, Tier::host}) {
    Config config = plain_config(directory_.path(), tier, kTiming);
    config.placement.gradients = tier;
    config.budget.device_bytes = std::uint64_t{8} << 20;
    config.budget.host_bytes = (tier == Tier::nvme ? std::uint64_t{32} : std::uint64_t{256}) << 20;
    const std::uint64_t before = resident_bytes();
    Engine engine(config);
    SyntheticTrainer trainer(engine, model);
    engine.commit();
    trainer.initialize();
    for (int s = 0; s < 2; ++s) trainer.step();
    engine.settle();
    const std::size_t at = tier == Tier::nvme ? 0 : 1;
    grown[at] = resident_bytes() - std::min(before, resident_bytes());
    peak_host[at] = engine.report().peak_host_bytes;
    peak_device[at] = engine.report().peak_device_bytes;
    EXPECT_LE(peak_device[at], config.budget.device_bytes);
    EXPECT_LE(peak_host[at], config.budget.host_bytes);
  }
  EXPECT_LE(peak_device[0], peak_device[1]);
  EXPECT_GE(peak_host[1], std::uint64_t{96} << 20);
  EXPECT_LE(peak_host[0], std::uint64_t{32} << 20);
  if (test::kSanitized) return;  // a sanitizer's own memory would count
  EXPECT_LE(grown[0], std::uint64_t{32 + 8 + 16} << 20);
  EXPECT_GE(grown[1], grown[0] + (std::uint64_t{60} << 20));
}

}  // namespace
}  // namespace ballast::testing
