// The power goes at any moment of a training run with durable steps: no step that was committed is lost, and the run
// that goes on gives what the undisturbed one gives, bit for bit.
//
//   BALLAST_CRASH_SEEDS=100000 BALLAST_CRASH_FIRST=1 crash_test    so many seeds, from that one
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/base/random.h>
#include <ballast/io/testing/crash_disk.h>
#include <ballast/io/testing/throttled_storage.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "durable/checkpoints.h"
#include "durable/stored_state.h"
#include "executor.h"
#include "support/engine_support.h"
#include "support/on_ranks.h"
#include "support/sanitizers.h"

namespace ballast::testing {
namespace {

using io::testing::Carelessness;
using io::testing::CrashDisk;

constexpr int kSteps = 6;
constexpr int kCrashesMax = 3;

std::uint64_t number_from(const char* name, std::uint64_t usual) {
  const char* text = std::getenv(name);
  return text == nullptr ? usual : std::strtoull(text, nullptr, 10);
}

// One of a few dozen runs, so that the undisturbed one is computed once.
struct Variant {
  Timing timing = Timing::just_in_time;
  int placement = 0;  // all on NVMe, parameters in host memory, optimizer states in host memory, all in host memory,
                      // all on the device, all on NVMe with the gradients
  int every = 1;
  int model = 0;
  bool poison = false;  // a step that is discarded
  bool saves = false;   // checkpoints, on a drive that lives on; the numbers are the same
  auto key() const { return std::tuple(timing, placement, every, model, poison); }
};

Variant make_variant(base::Random& random) {
  Variant v;
  v.timing = static_cast<Timing>(1 + random.below(3));
  v.placement = static_cast<int>(random.below(6));
  v.every = 1 + static_cast<int>(random.below(3) == 0 ? 1 : 0);
  v.model = static_cast<int>(random.below(2));
  v.poison = v.timing != Timing::eager && random.below(3) == 0;
  v.saves = random.below(3) == 0;
  return v;
}

std::vector<SyntheticUnit> model_of(const Variant& v) {
  std::vector<SyntheticUnit> model;
  for (int u = 0; u < 2 + v.model; ++u) {
    model.push_back({"u." + std::to_string(u), {{"weight", {300 + 900 * u, 3}}, {"bias", {7 + u}, {.group = 1}}}});
  }
  if (v.model == 1) {  // one that is frozen
    model[1].parameters.push_back({"fixed", {5}, {.trainable = false}});
  }
  return model;
}

Config config_of(const Variant& v, const std::string& directory, bool durable) {
  Config config = plain_config(directory, Tier::nvme, v.timing);
  config.threads = 1;
  if (v.placement == 1 || v.placement == 3) config.placement.parameters = Tier::host;
  if (v.placement == 2 || v.placement == 3) config.placement.optimizer = Tier::host;
  if (v.placement == 5) config.placement.gradients = Tier::nvme;
  if (v.placement == 4) config.placement.parameters = config.placement.optimizer = Tier::device;
  config.budget.device_bytes = config.budget.host_bytes = std::uint64_t{4} << 20;
  if (durable) config.durability.every_steps = static_cast<std::uint64_t>(v.every);
  return config;
}

SyntheticOptions options_of(const Variant& v) {
  SyntheticOptions options;
  if (v.poison) options.poison = [](int step) { return step == 3; };
  return options;
}

struct Undisturbed {
  std::vector<double> losses;
  std::vector<float> values;
  std::vector<std::vector<float>> values_after;  // of each step
};

const Undisturbed& undisturbed(const Variant& v, const std::string& directory) {
  static std::map<decltype(v.key()), Undisturbed> known;
  const auto [at, fresh] = known.try_emplace(v.key());
  if (!fresh) return at->second;
  Engine engine(config_of(v, directory, false));
  SyntheticTrainer trainer(engine, model_of(v), options_of(v));
  engine.commit();
  trainer.initialize();
  for (int s = 0; s < kSteps; ++s) {
    at->second.losses.push_back(trainer.step());
    at->second.values_after.push_back(trainer.values());
  }
  at->second.values = trainer.values();
  return at->second;
}

// Of a checkpoint: parameters in the order of the trainer's values().
std::vector<float> saved_values(const std::string& folder, std::uint64_t step) {
  engine::StoredState state({folder}, step);
  state.verify();
  std::vector<float> all;
  for (std::uint32_t u = 0; u < state.layout().units.size(); ++u) {
    const auto& parameters = state.layout().units[u].parameters;
    for (std::uint32_t p = 0; p < parameters.size(); ++p) {
      all.resize(all.size() + parameters[p].elements);
      state.read(u, p, 0, std::span(all).last(parameters[p].elements), {}, {});
    }
  }
  return all;
}

// Empty, or what is wrong with the checkpoints that are in place.
std::string check_saves(const std::string& folder, const Undisturbed& expected) {
  for (const auto& [number, path] : engine::list_checkpoints(folder)) {
    // By the trainer's steps, of which some are discarded.
    const std::uint64_t step = engine::ManifestLog::steps_of(*io::make_small_files(path)).at(0);
    if (saved_values(path, step) != expected.values_after[number - 1]) return path + " holds other values";
  }
  return "";
}
// What else is wrong: the disk cares less, changes bits while the power is off, or the engine takes all it reads for
// what it has written.
struct Trial {
  Carelessness careless = {};
  bool damage = false;
  bool trusts_chunks = false;
};

// Empty, or what went wrong.
std::string run_with_crashes(std::uint64_t seed, const Trial& trial = {}) {
  // Only heads of chunk files are written there.
  static const bool in_memory = ::access("/dev/shm", W_OK) == 0;
  TemporaryDirectory directory(in_memory ? "/dev/shm" : "/tmp");
  base::Random random(seed);
  const Variant v = make_variant(random);
  const Undisturbed& expected = undisturbed(v, directory.path() + "/undisturbed");
  CrashDisk disk(seed, trial.careless);
  auto hooks = std::make_shared<engine::TestHooks>();
  hooks->storage_factory = [&](io::Backend, const io::StorageOptions& options, const std::string& path) {
    return io::OpenedStorage{disk.storage(options, path), "a disk that crashes"};
  };
  hooks->small_files = disk.small_files();
  hooks->inline_pool = true;
  const std::chrono::microseconds latency(random.below(4) * 700);
  hooks->checkpoint_storage = [latency](io::Backend, const io::StorageOptions& options, const std::string&) {
    io::OpenedStorage opened = io::open_storage(io::Backend::threads, options);
    opened.storage = std::make_unique<io::testing::ThrottledStorage>(
        std::move(opened.storage), io::testing::Throttle{.latency = latency}, options.wake);
    return opened;
  };
  const std::string saves = directory.path() + "/saves";
  hooks->trusts_chunks = trial.trusts_chunks;
  EngineEnvironment environment;
  environment.test_hooks = hooks;
  const Config config = config_of(v, directory.path(), true);
  std::uint64_t committed = 0;
  bool any_committed = false;
  for (int crashes = 0;; ++crashes) {
    // One step's worth of traffic is some tens of operations.
    if (crashes < kCrashesMax) disk.crash_after(1 + random.below(100 + 200 * random.below(3)));
    std::string failure;
    try {
      Engine engine(config, environment);
      SyntheticTrainer trainer(engine, model_of(v), options_of(v));
      engine.commit({.existing = ExistingRun::resume});
      const bool resumed = trainer.resume();
      if (any_committed && !resumed) return "a committed run was not found again";
      // Of a damaged step the one before it takes the place.
      const std::uint64_t least =
          trial.damage ? committed - std::min<std::uint64_t>(committed, config.durability.every_steps) : committed;
      if (resumed && engine.resumed()->step < least) {
        return "step " + std::to_string(committed) + " was committed and step " +
               std::to_string(engine.resumed()->step) + " found";
      }
      if (resumed) committed = engine.resumed()->step;
      if (!resumed) trainer.initialize();
      try {
        while (trainer.next_step() < kSteps) {
          const int step = trainer.next_step();
          const double loss = trainer.step();
          if (const auto now = engine.committed_step()) {
            committed = *now;
            any_committed = true;
          }
          if (loss != expected.losses[static_cast<std::size_t>(step)]) {
            return "the loss of step " + std::to_string(step) + " differs";
          }
          if (v.saves && random.below(2) == 0) {
            engine.save_checkpoint(saves + "/step-" + std::to_string(trainer.next_step()));
          }
        }
        engine.settle();
        if (trainer.values() != expected.values) return "the final values differ";
        return check_saves(saves, expected);
      } catch (const IoError& error) {
        failure = error.what();
      }
    } catch (const IoError& error) {
      failure = error.what();
    } catch (const CorruptionError& error) {
      if (trial.damage) return "";  // seen, and nothing was computed with it
      return std::string("damage where there was none: ") + error.what();
    }
    if (!disk.crashed()) return "an error without a cause: " + failure;
    disk.restart();
    if (trial.damage) disk.damage();
  }
}

TEST(Crash, AnyMomentLosesNoCommittedStepAndTheRestIsTheSame) {
  const std::uint64_t first = number_from("BALLAST_CRASH_FIRST", 1);
  const std::uint64_t seeds = number_from("BALLAST_CRASH_SEEDS", test::kSanitized ? 300 : 5000);
  for (std::uint64_t seed = first; seed < first + seeds; ++seed) {
    const Watchdog watchdog;
    const std::string wrong = run_with_crashes(seed);
    ASSERT_EQ(wrong, "") << "repeat with: BALLAST_CRASH_FIRST=" << seed << " BALLAST_CRASH_SEEDS=1 crash_test";
  }
}

// A bit that changes while the power is off: the numbers stay the same, or the run ends and says where.
TEST(Crash, DamageIsNeverComputedWith) {
  const std::uint64_t first = number_from("BALLAST_CRASH_FIRST", 1);
  const std::uint64_t seeds = number_from("BALLAST_CRASH_SEEDS", test::kSanitized ? 50 : 500);
  for (std::uint64_t seed = first; seed < first + seeds; ++seed) {
    const Watchdog watchdog;
    ASSERT_EQ(run_with_crashes(seed, {.damage = true}), "")
        << "repeat with: BALLAST_CRASH_FIRST=" << seed << " BALLAST_CRASH_SEEDS=1 crash_test";
  }
}

// That the tests above would see what they look for: with the flush of the data, of the manifests and their directory,
// the rename, or the checksums taken out.
TEST(Crash, CarelessnessIsSeenWithinAThousandSeeds) {
  const std::pair<const char*, Trial> trials[] = {
      {"no flush of chunks", {.careless = {.no_data_flush = true}}},
      {"no flush of manifests and names", {.careless = {.no_small_flush = true}}},
      {"no rename", {.careless = {.lost_rename = true}}},
      {"no flush of manifests, which are written in place", {.careless = {.no_small_flush = true, .no_rename = true}}},
      {"no checksums on a disk that changes bits", {.damage = true, .trusts_chunks = true}},
      {"no checksums and no flush of chunks", {.careless = {.no_data_flush = true}, .trusts_chunks = true}}};
  for (const auto& [name, trial] : trials) {
    std::uint64_t seed = 1;
    std::string wrong;
    while (seed <= 1000) {
      const Watchdog watchdog;
      wrong = run_with_crashes(seed, trial);
      if (!wrong.empty()) break;
      ++seed;
    }
    EXPECT_FALSE(wrong.empty()) << name;
    std::printf("%s: seen at seed %llu: %s\n", name, static_cast<unsigned long long>(seed), wrong.c_str());
  }
}

// --- several ranks, each with a disk of its own ----------------------------------------------------------------------

// What one start of all ranks has come to.
struct Start {
  std::vector<std::string> errors;  // by rank; empty: it was done
  std::vector<std::string> wrong;
  std::vector<std::uint64_t> committed;
};

// Losses and values of an undisturbed run of so many ranks; durable where environments are handed in.
using Environments = std::vector<EngineEnvironment>;
Start start_ranks(const Config& config, const Variant& v, int ranks, const Environments& environments,
                  std::uint64_t least, bool any_committed, Undisturbed* result, const Undisturbed* expected) {
  Start start;
  start.errors.resize(static_cast<std::size_t>(ranks));
  start.wrong.resize(static_cast<std::size_t>(ranks));
  start.committed.assign(static_cast<std::size_t>(ranks), 0);
  try {
    on_ranks(ranks, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
      const auto r = static_cast<std::size_t>(rank);
      EngineEnvironment environment = environments[r];
      environment.communicator = communicator;
      try {
        Engine engine(config, environment);
        SyntheticTrainer trainer(engine, model_of(v), options_of(v));
        engine.commit({.existing = ExistingRun::resume});
        const bool resumed = trainer.resume();
        if (any_committed && !resumed) start.wrong[r] = "a committed run was not found again";
        if (resumed && engine.resumed()->step < least) {
          start.wrong[r] = "step " + std::to_string(least) + " was committed and step " +
                           std::to_string(engine.resumed()->step) + " found";
        }
        if (!resumed) trainer.initialize();
        while (trainer.next_step() < kSteps) {
          const auto step = static_cast<std::size_t>(trainer.next_step());
          const double loss = trainer.step();
          if (const auto now = engine.committed_step()) start.committed[r] = *now + 1;
          if (result != nullptr && rank == 0) result->losses.push_back(loss);
          if (expected != nullptr && loss != expected->losses[step]) {
            start.wrong[r] = "the loss of step " + std::to_string(step) + " differs";
          }
        }
        engine.settle();
        const std::vector<float> values = trainer.values();
        if (result != nullptr && rank == 0) result->values = values;
        if (expected != nullptr && values != expected->values) start.wrong[r] = "the final values differ";
      } catch (const CorruptionError& error) {
        start.wrong[r] = std::string("damage where there was none: ") + error.what();
        throw;
      } catch (const Error& error) {
        start.errors[r] = error.what();
        throw;
      }
    });
  } catch (const Error&) {  // told by rank
  }
  return start;
}

// One or all of them die at any moment, with the power of their disks or without.
std::string ranks_with_crashes(std::uint64_t seed) {
  TemporaryDirectory directory(::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
  base::Random random(seed);
  Variant v = make_variant(random);
  v.poison = false;
  const int ranks = 2 + static_cast<int>(random.below(2));
  static std::map<std::pair<decltype(v.key()), int>, Undisturbed> known;
  const auto [expected, fresh] = known.try_emplace({v.key(), ranks});
  if (fresh) {
    start_ranks(config_of(v, directory.path() + "/undisturbed", false), v, ranks,
                Environments(static_cast<std::size_t>(ranks)), 0, false, &expected->second, nullptr);
  }
  std::vector<std::unique_ptr<CrashDisk>> disks;
  Environments environments;
  for (int rank = 0; rank < ranks; ++rank) {
    CrashDisk* const disk =
        disks.emplace_back(std::make_unique<CrashDisk>(seed * 7 + static_cast<std::uint64_t>(rank))).get();
    auto hooks = std::make_shared<engine::TestHooks>();
    hooks->storage_factory = [disk](io::Backend, const io::StorageOptions& options, const std::string& path) {
      return io::OpenedStorage{disk->storage(options, path), "a disk that crashes"};
    };
    hooks->small_files = disk->small_files();
    hooks->inline_pool = true;
    environments.emplace_back().test_hooks = hooks;
  }
  const Config config = config_of(v, directory.path(), true);
  std::uint64_t committed = 0;  // one more than the step; 0: none
  for (int crashes = 0;; ++crashes) {
    const bool all = random.below(3) == 0;
    const std::size_t victim = random.below(disks.size());
    for (std::size_t rank = 0; rank < disks.size() && crashes < kCrashesMax; ++rank) {
      if (all || rank == victim) disks[rank]->crash_after(1 + random.below(80 + 100 * random.below(3)));
    }
    const Start start = start_ranks(config, v, ranks, environments, committed == 0 ? 0 : committed - 1, committed > 0,
                                    nullptr, &expected->second);
    bool ended = true, crashed = false;
    for (std::size_t rank = 0; rank < disks.size(); ++rank) {
      if (!start.wrong[rank].empty()) return "rank " + std::to_string(rank) + ": " + start.wrong[rank];
      committed = std::max(committed, start.committed[rank]);
      ended = ended && start.errors[rank].empty();
      crashed = crashed || disks[rank]->crashed();
    }
    if (ended) return "";
    if (!crashed) return "an error without a cause: " + start.errors[0] + " | " + start.errors[1];
    const bool power = random.below(2) == 0;  // of all; else what the others have written stays
    for (const auto& disk : disks) {
      if (power || disk->crashed()) disk->restart();
    }
  }
}

TEST(Crash, RanksThatDieAtAnyMomentLeaveACommittedStepThatAllOfThemHave) {
  const std::uint64_t first = number_from("BALLAST_CRASH_FIRST", 1);
  const std::uint64_t seeds = number_from("BALLAST_CRASH_SEEDS", test::kSanitized ? 20 : 150);
  for (std::uint64_t seed = first; seed < first + seeds; ++seed) {
    const Watchdog watchdog;
    ASSERT_EQ(ranks_with_crashes(seed), "")
        << "repeat with: BALLAST_CRASH_FIRST=" << seed << " BALLAST_CRASH_SEEDS=1 crash_test";
  }
}

}  // namespace
}  // namespace ballast::testing
