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

#include <cstdlib>
#include <map>
#include <tuple>

#include "durable/checkpoints.h"
#include "durable/stored_state.h"
#include "executor.h"
#include "support/engine_support.h"
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

// Empty, or what went wrong.
std::string run_with_crashes(std::uint64_t seed, Carelessness careless = {}) {
  // Only heads of chunk files are written there.
  static const bool in_memory = ::access("/dev/shm", W_OK) == 0;
  TemporaryDirectory directory(in_memory ? "/dev/shm" : "/tmp");
  base::Random random(seed);
  const Variant v = make_variant(random);
  const Undisturbed& expected = undisturbed(v, directory.path() + "/undisturbed");
  CrashDisk disk(seed, careless);
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
  EngineEnvironment environment;
  environment.test_hooks = hooks;
  std::uint64_t committed = 0;
  bool any_committed = false;
  for (int crashes = 0;; ++crashes) {
    // One step's worth of traffic is some tens of operations.
    if (crashes < kCrashesMax) disk.crash_after(1 + random.below(100 + 200 * random.below(3)));
    std::string failure;
    try {
      Engine engine(config_of(v, directory.path(), true), environment);
      SyntheticTrainer trainer(engine, model_of(v), options_of(v));
      engine.commit({.existing = ExistingRun::resume});
      const bool resumed = trainer.resume();
      if (any_committed && !resumed) return "a committed run was not found again";
      if (resumed && engine.resumed()->step < committed) {
        return "step " + std::to_string(committed) + " was committed and step " +
               std::to_string(engine.resumed()->step) + " found";
      }
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
      return std::string("damage where there was none: ") + error.what();
    }
    if (!disk.crashed()) return "an error without a cause: " + failure;
    disk.restart();
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

// That the test above would see what it looks for.
TEST(Crash, CarelessnessIsSeenWithinAThousandSeeds) {
  for (const Carelessness careless : {Carelessness{.no_data_flush = true}, Carelessness{.no_small_flush = true},
                                      Carelessness{.no_small_flush = true, .no_rename = true}}) {
    SCOPED_TRACE(std::to_string(careless.no_data_flush) + std::to_string(careless.no_small_flush) +
                 std::to_string(careless.no_rename));
    bool seen = false;
    for (std::uint64_t seed = 1; seed <= 1000 && !seen; ++seed) {
      const Watchdog watchdog;
      seen = !run_with_crashes(seed, careless).empty();
    }
    EXPECT_TRUE(seen);
  }
}

}  // namespace
}  // namespace ballast::testing
