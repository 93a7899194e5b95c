// What a plan says that memory will hold, against what the process then holds: for models of every kind and each tier.
// Each in a child process, whose memory is its own. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "support/engine_support.h"
#include "support/on_ranks.h"
#include "support/sanitizers.h"

namespace ballast::testing {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

// In KiB, as the kernel counts.
std::uint64_t status_kib(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(name + ":", 0) == 0) return std::stoull(line.substr(name.size() + 1));
  }
  return 0;
}
// The most so far. Reserved huge pages do not count in the resident set.
std::uint64_t held_bytes() { return (status_kib("VmHWM") + status_kib("HugetlbPages")) << 10; }

struct Model {
  std::string name;
  std::vector<SyntheticUnit> units;
  bool tied = false;
  int ranks = 1;
};

std::vector<Model> models() {
  const auto blocks = [](int count, std::int64_t elements) {
    std::vector<SyntheticUnit> units;
    for (int u = 0; u < count; ++u) units.push_back({"u" + std::to_string(u), {{"w", {elements}}}});
    return units;
  };
  std::vector<ParameterSpec> small;
  for (int i = 0; i < 1000; ++i) small.push_back({"p" + std::to_string(i), {1 + i % 700}});
  std::vector<SyntheticUnit> frozen = blocks(6, 700'001);
  for (std::size_t u = 0; u < frozen.size(); u += 2) {
    frozen[u].trainable = false;
    frozen[u].parameters[0].options.trainable = false;
  }
  return {{"tiny", small_model(3)},
          {"one huge layer", blocks(1, 6'000'000)},
          {"a thousand small tensors", {{"u", small}}},
          {"tied", blocks(4, 1'000'003), true},
          {"half frozen", frozen},
          {"three uneven ranks", blocks(4, 1'000'003), false, 3}};
}

// Three steps; what each rank has planned.
std::vector<std::uint64_t> train(const std::vector<SyntheticUnit>& units, bool tied, int ranks, Tier tier,
                                 const std::string& directory) {
  std::vector<std::uint64_t> planned(static_cast<std::size_t>(ranks));
  on_ranks(ranks, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
    Config config = plain_config(directory, tier, Timing::just_in_time);
    config.budget.device_bytes = config.budget.host_bytes = 512 * kMiB;
    config.threads = 1;
    Engine engine(config, {.communicator = communicator});
    SyntheticTrainer trainer(engine, units, {.tied = tied});
    engine.commit();
    trainer.initialize();
    for (int s = 0; s < 3; ++s) trainer.step();
    const Report report = engine.report();
    std::uint64_t& mine = planned[static_cast<std::size_t>(rank)];
    mine = report.peak_device_bytes + report.peak_host_bytes;
    // Each line of the sum is shown.
    std::uint64_t lines = 0;
    for (const auto* ranges : {&report.device_memory, &report.host_memory}) {
      for (const MemoryRange& range : *ranges) lines += range.bytes;
    }
    if (lines > mine || mine - lines > 2 * 4096) ::_exit(3);
  });
  return planned;
}

// Planned and measured bytes, in a process that has done nothing before.
std::pair<std::uint64_t, std::uint64_t> planned_and_measured(const Model& model, Tier tier) {
  int channel[2];
  if (::pipe(channel) != 0) return {};
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(100);
    std::uint64_t words[2] = {0, 0};
    {
      const TemporaryDirectory directory;
      train(small_model(1), false, model.ranks, tier, directory.path());  // code, threads and their stacks
      const std::uint64_t before = held_bytes();
      const std::vector<std::uint64_t> planned = train(model.units, model.tied, model.ranks, tier, directory.path());
      for (const std::uint64_t each : planned) words[0] += each;
      words[1] = held_bytes() - before;
    }
    ::_exit(::write(channel[1], words, sizeof words) == sizeof words ? 0 : 2);
  }
  ::close(channel[1]);
  std::uint64_t words[2] = {0, 0};
  const ssize_t count = ::read(channel[0], words, sizeof words);
  ::close(channel[0]);
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(count, static_cast<ssize_t>(sizeof words));
  return {words[0], words[1]};
}

TEST(PlanPeaks, WhatIsPlannedIsWhatIsHeld) {
  if (test::kSanitized) GTEST_SKIP() << "a sanitizer's own memory would count";
  for (const Model& model : models()) {
    for (const Tier tier : {Tier::device, Tier::host, Tier::nvme}) {
      SCOPED_TRACE(model.name + ", " + std::string(to_string(tier)));
      const auto [planned, measured] = planned_and_measured(model, tier);
      // Of each rank: a chunk's initial values pass through memory of the process's own.
      const std::uint64_t slack = std::max(16 * kMiB * static_cast<std::uint64_t>(model.ranks), measured / 10);
      EXPECT_LE(planned, measured + slack);
      EXPECT_LE(measured, planned + slack);
      RecordProperty((model.name + ", " + std::string(to_string(tier))).c_str(),
                     std::to_string(planned / 1024) + " KiB planned, " + std::to_string(measured / 1024) + " held");
    }
  }
}

}  // namespace
}  // namespace ballast::testing
