// Engines by the hundred, ended at any moment, with little memory, little disk and slow drives; and long runs that do
// not grow. SPDX-License-Identifier: Apache-2.0
#include <ballast/io/testing/faulty_storage.h>
#include <ballast/io/testing/throttled_storage.h>
#include <dirent.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "allocation_counter.h"
#include "executor.h"
#include "support/engine_support.h"

namespace ballast {
namespace {

using testing::contribute;
using testing::plain_config;
using testing::small_model;
using testing::SyntheticTrainer;
using testing::SyntheticUnit;
using testing::TemporaryDirectory;
using testing::Watchdog;

std::size_t open_descriptors() {
  std::size_t count = 0;
  DIR* directory = ::opendir("/proc/self/fd");
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count;
}

std::uint64_t resident_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmRSS:", 0) == 0) return std::stoull(line.substr(6));
  }
  return 0;
}

Config little(const std::string& path, Timing timing) {
  Config config = plain_config(path, Tier::nvme, timing);
  config.budget.host_bytes = std::uint64_t{2} << 20;
  config.budget.device_bytes = std::uint64_t{1} << 20;
  return config;
}

TEST(EndTest, TwoHundredEnginesEndAtRandomMomentsOverASlowDrive) {
  const Watchdog watchdog(250);
  const TemporaryDirectory directory;
  const std::size_t before = open_descriptors();
  // Guards beside which nothing may be written once an engine has gone.
  std::vector<std::uint8_t> guard(std::size_t{1} << 20, 0xA5);
  for (int round = 0; round < 200; ++round) {
    SCOPED_TRACE(round);
    base::Random random(static_cast<std::uint64_t>(round) + 1);
    const Timing timing = static_cast<Timing>(1 + random.below(3));
    Config config = little(directory.path(), timing);
    config.nvme.backend = round % 8 == 0 ? "io_uring" : "threads";
    EngineEnvironment environment;
    auto hooks = std::make_shared<engine::TestHooks>();
    hooks->storage_factory = [](io::Backend backend, const io::StorageOptions& options, const std::string&) {
      io::OpenedStorage opened = io::open_storage(backend, options);
      opened.storage = std::make_unique<io::testing::ThrottledStorage>(
          std::move(opened.storage), io::testing::Throttle{.latency = std::chrono::microseconds(300)}, options.wake);
      return opened;
    };
    if (round % 2 == 0) environment.test_hooks = hooks;
    Engine engine(config, environment);
    SyntheticTrainer trainer(engine, small_model(3));
    engine.commit();
    if (random.below(20) == 0) continue;
    trainer.initialize();
    for (std::uint64_t s = random.below(3); s > 0; --s) trainer.step();
    if (random.below(4) == 0) continue;
    auto step = engine.begin_step();
    auto pass = step.begin_pass();
    Stream stream = engine.stream();
    std::vector<ParameterLease> leases;
    std::vector<GradientLease> gradients;
    for (std::uint64_t k = 0, n = 1 + random.below(6); k < n; ++k) {
      const UnitId unit = trainer.ids()[random.below(3)];
      try {
        leases.push_back(engine.acquire(unit, stream));
        if (random.below(3) == 0) gradients.push_back(engine.gradients(unit, stream));
        if (random.below(3) == 0 && !gradients.empty()) {
          gradients.back().commit(stream);
          gradients.pop_back();
        }
        if (random.below(2) == 0) leases.pop_back();
      } catch (const PlanError&) {
      } catch (const UsageError&) {
      }
    }
    if (random.below(2) == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random.below(1500)));
    }
  }
  EXPECT_EQ(guard, std::vector<std::uint8_t>(guard.size(), 0xA5));
  EXPECT_EQ(open_descriptors(), before);
}

TEST(FailureTest, ADriveThatFailsAtARandomMomentIsReportedByWhateverIsCalledAndNothingStandsStill) {
  const Watchdog watchdog(250);
  const TemporaryDirectory directory;
  int failures = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    base::Random random(seed);
    auto hooks = std::make_shared<engine::TestHooks>();
    hooks->storage_factory = [seed](io::Backend backend, const io::StorageOptions& options, const std::string&) {
      io::OpenedStorage opened = io::open_storage(backend, options);
      io::testing::Faults faults{.seed = seed, .delay_polls_max = 3};
      (seed % 3 == 0 ? faults.flips_per_mille : seed % 3 == 1 ? faults.errors_per_mille : faults.shorts_per_mille) = 15;
      opened.storage = std::make_unique<io::testing::FaultyStorage>(std::move(opened.storage), faults, options.wake);
      return opened;
    };
    EngineEnvironment environment;
    environment.test_hooks = hooks;
    Config config = little(directory.path(), static_cast<Timing>(1 + seed % 3));
    config.nvme.backend = seed % 2 == 0 ? "threads" : "auto";
    Engine engine(config, environment);
    SyntheticTrainer trainer(engine, small_model(3));
    engine.commit();
    bool failed = false;
    const auto attempt = [&](const auto& call) {
      try {
        call();
        return;
      } catch (const CorruptionError& error) {
        failed = true;
        EXPECT_NE(std::string(error.what()).find("ballast-rank0.chunks"), std::string::npos) << error.what();
      } catch (const IoError&) {
        failed = true;
      } catch (const UsageError& error) {
        ADD_FAILURE() << error.what();
      }
    };
    attempt([&] { trainer.initialize(); });
    for (int k = 0; k < 60 && !failed; ++k) {
      switch (random.below(5)) {
        case 0:
          attempt([&] { engine.settle(); });
          break;
        case 1:
          attempt([&] { testing::read_one(engine, {static_cast<std::uint32_t>(random.below(3)), 0}); });
          break;
        case 2:
          attempt([&] {
            auto pass = engine.begin_pass({.kind = Pass::evaluate});
            auto lease = engine.acquire(trainer.ids()[random.below(3)], engine.stream());
            lease.wait();
          });
          break;
        default:
          attempt([&] { trainer.step(); });
      }
    }
    if (!failed) continue;
    ++failures;
    EXPECT_THROW(engine.settle(), Error);
    EXPECT_THROW(engine.begin_step(), Error);
    EXPECT_THROW(engine.begin_pass({.kind = Pass::evaluate}), Error);
    EXPECT_THROW(testing::read_one(engine, {0, 0}), Error);
  }
  EXPECT_GT(failures, 20);
}

TEST(ManyTest, AHundredEnginesLiveAtOnceAndLeaveNothing) {
  const Watchdog watchdog(250);
  const TemporaryDirectory directory;
  const std::size_t before = open_descriptors();
  {
    rlimit limit{};
    ::getrlimit(RLIMIT_MEMLOCK, &limit);
    const rlimit old = limit;
    limit.rlim_cur = 64 << 10;
    ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &limit), 0);
    std::vector<std::unique_ptr<Engine>> engines;
    std::vector<std::unique_ptr<SyntheticTrainer>> trainers;
    for (int i = 0; i < 100; ++i) {
      Config config = little(directory.path() + "/" + std::to_string(i), Timing::just_in_time);
      config.nvme.queue_depth = 1024;
      config.threads = 1;
      engines.push_back(std::make_unique<Engine>(config));
      trainers.push_back(std::make_unique<SyntheticTrainer>(*engines.back(), small_model(2)));
      engines.back()->commit();
      trainers.back()->initialize();
    }
    double loss = 0;
    for (auto& trainer : trainers) {
      const double first = trainer->step();
      if (loss == 0) loss = first;
      EXPECT_EQ(first, loss);
    }
    trainers.clear();
    engines.clear();
    ::setrlimit(RLIMIT_MEMLOCK, &old);
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(DirectoryTest, TwoEnginesNeverShareADirectory) {
  const TemporaryDirectory directory;
  Engine first(little(directory.path(), Timing::just_in_time));
  SyntheticTrainer one(first, small_model(2));
  first.commit();
  one.initialize();
  const double loss = one.step();
  {
    Engine second(little(directory.path(), Timing::just_in_time));
    second.add_unit("u", {{"p", {1000}}});
    try {
      second.commit();
      FAIL() << "the second engine took the first one's files";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(directory.path()), std::string::npos) << error.what();
    }
  }
  EXPECT_NE(one.step(), loss);
}

// A group with a limit of its own, below this process's. Empty where none can be made here.
class MemoryGroup {
 public:
  explicit MemoryGroup(std::uint64_t limit_bytes) {
    std::ifstream groups("/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
      const std::size_t first = line.find(':'), second = line.find(':', first + 1);
      const std::string controllers = line.substr(first + 1, second - first - 1), below = line.substr(second + 1);
      const bool old = controllers == "memory";
      if (!old && !controllers.empty()) continue;
      for (const std::string root : {old ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup", "/sys/fs/cgroup"}) {
        const std::string path = root + below + "/ballast-test-" + std::to_string(::getpid());
        if (::mkdir(path.c_str(), 0755) != 0) continue;
        path_ = path;
        if (write(old ? "memory.limit_in_bytes" : "memory.max", limit_bytes)) return;
        ::rmdir(path.c_str());
        path_.clear();
      }
    }
  }
  ~MemoryGroup() {
    if (!path_.empty()) ::rmdir(path_.c_str());
  }
  MemoryGroup(const MemoryGroup&) = delete;
  MemoryGroup& operator=(const MemoryGroup&) = delete;
  bool there() const { return !path_.empty(); }
  bool enter() const { return write("cgroup.procs", static_cast<std::uint64_t>(::getpid())); }

 private:
  bool write(const std::string& name, std::uint64_t value) const {
    std::ofstream file(path_ + "/" + name);
    file << value << std::flush;
    return file.good();
  }
  std::string path_;
};

// Refused with the numbers instead of being killed; and within the limit the same bits.
TEST(MemoryTest, BudgetsBeyondTheMemoryGroupAreRefusedAndThoseWithinItWork) {
#ifdef BALLAST_SANITIZED
  GTEST_SKIP() << "a sanitizer's own memory would count";
#endif
  const TemporaryDirectory directory;
  const MemoryGroup group(std::uint64_t{192} << 20);
  if (!group.there()) GTEST_SKIP() << "no memory cgroup can be made here";
  const auto losses = [&](Tier tier, std::uint64_t host_mib, std::int64_t elements) {
    std::vector<SyntheticUnit> model;
    for (int u = 0; u < 8; ++u) model.push_back({"u" + std::to_string(u), {{"w", {elements}}}});
    Config config = plain_config(directory.path(), tier, Timing::just_in_time);
    config.budget.device_bytes = config.budget.host_bytes = host_mib << 20;
    EngineEnvironment environment;
    auto hooks = std::make_shared<engine::TestHooks>();
    hooks->inline_pool = true;  // a forked child has no threads but its own
    environment.test_hooks = hooks;
    Engine engine(config, environment);
    SyntheticTrainer trainer(engine, model);
    engine.commit();
    trainer.initialize();
    return std::pair(trainer.step(), trainer.step());
  };
  const auto expected = losses(Tier::nvme, 48, 1 << 20);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(100);
    if (!group.enter()) ::_exit(77);
    int status = 1;
    try {
      losses(Tier::host, 8192, 32 << 20);  // 4 GiB
    } catch (const PlanError& error) {
      const std::string text = error.what();
      status = text.find("cgroup") != text.npos && text.find("192 MiB") != text.npos ? 0 : 2;
    }
    if (status == 0 && losses(Tier::nvme, 48, 1 << 20) != expected) status = 3;
    ::_exit(status);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  if (status == 77 << 8) GTEST_SKIP() << "the memory cgroup cannot be entered";
  EXPECT_EQ(status, 0);
}

TEST(DiskTest, AFullDiskIsRefusedAtCommitWithNumbers) {
  const TemporaryDirectory directory;
  bool mounted = false;
  // A thread with mounts of its own: the small disk ends with it.
  std::thread([&] {
    mounted = ::unshare(CLONE_NEWNS) == 0 && ::mount("", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
              ::mount("small", directory.path().c_str(), "tmpfs", 0, "size=4m") == 0;
    if (!mounted) return;
    Engine engine(plain_config(directory.path(), Tier::nvme, Timing::just_in_time));
    engine.add_unit("u", {{"p", {1000, 1000}}});
    try {
      engine.commit();
      ADD_FAILURE() << "12 MB fit into 4 MiB";
    } catch (const IoError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find(directory.path()), std::string::npos) << text;
      EXPECT_NE(text.find("MiB"), std::string::npos) << text;
    }
  }).join();
  if (!mounted) GTEST_SKIP() << "a small disk needs rights to mount one";
}

// 10 MB of states, no closures: the least that a trainer can do.
class LongRun {
 public:
  explicit LongRun(const Config& config) : engine_(config) {
    for (int u = 0; u < 6; ++u) ids_.push_back(engine_.add_unit("u" + std::to_string(u), parameters_));
    engine_.commit();
    engine_.initialize([](ParameterId, std::int64_t, std::span<float> values) {
      for (float& value : values) value = 0.5f;
    });
  }
  void step() {
    Stream stream = engine_.stream();
    auto step = engine_.begin_step();
    {
      auto pass = step.begin_pass();
      for (UnitId id : ids_) engine_.acquire(id, stream).release(stream);
      for (std::size_t u = ids_.size(); u-- > 0;) {
        auto lease = engine_.acquire(ids_[u], stream);
        auto gradients = engine_.gradients(ids_[u], stream);
        stream.synchronize();
        testing::fill_gradient(gradients[{ids_[u].index, 0}], 0.01f);
        gradients.commit(stream);
        lease.release(stream);
      }
    }
    step.finish_backward();
    step.update();
  }
  Engine& engine() { return engine_; }

 private:
  std::vector<ParameterSpec> parameters_ = {{"w", {140, 1000}}};
  Engine engine_;
  std::vector<UnitId> ids_;
};

// Reads of 20 ms and maths of 20 ms, ten units in turn: from the second round on all are under way before they are
// asked for. The rounds' times are told, and not judged.
TEST(PrefetchTest, AFixedOrderIsHitFromTheSecondRoundOn) {
  const Watchdog watchdog(60);
  const TemporaryDirectory directory;
  auto hooks = std::make_shared<engine::TestHooks>();
  hooks->storage_factory = [](io::Backend backend, const io::StorageOptions& options, const std::string&) {
    io::OpenedStorage opened = io::open_storage(backend, options);
    opened.storage = std::make_unique<io::testing::ThrottledStorage>(
        std::move(opened.storage), io::testing::Throttle{.latency = std::chrono::milliseconds(20)}, options.wake);
    return opened;
  };
  EngineEnvironment environment;
  environment.test_hooks = hooks;
  Config config = plain_config(directory.path(), Tier::nvme, Timing::just_in_time);
  config.budget.device_bytes = 160 << 10;  // room for a unit and its gradients
  Engine engine(config, environment);
  std::vector<UnitId> units;
  for (int u = 0; u < 10; ++u) units.push_back(engine.add_unit("u" + std::to_string(u), {{"w", {16384}}}));
  engine.commit();
  engine.initialize(
      [](ParameterId, std::int64_t, std::span<float> values) { std::fill(values.begin(), values.end(), 1.0f); });
  for (int round = 1; round <= 5; ++round) {
    const Report before = engine.report();
    const auto begin = std::chrono::steady_clock::now();
    {
      auto pass = engine.begin_pass({.kind = Pass::evaluate});
      for (const UnitId unit : units) {
        auto lease = engine.acquire(unit, engine.stream());
        engine.stream().enqueue([] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
        lease.release(engine.stream());
      }
      engine.stream().synchronize();
    }
    const Report after = engine.report();
    const auto hits = after.acquires_prefetched - before.acquires_prefetched;
    RecordProperty("round " + std::to_string(round) + " ms",
                   std::to_string((std::chrono::steady_clock::now() - begin) / std::chrono::milliseconds(1)));
    EXPECT_EQ(after.acquires - before.acquires, 10u);
    if (round > 1) {
      EXPECT_GE(hits, 9u) << "round " << round;
    }
  }
}

TEST(LongRunTest, FiveHundredStepsDoNotGrow) {
  for (Timing timing : {Timing::eager, Timing::just_in_time}) {
    SCOPED_TRACE(to_string(timing));
    const Watchdog watchdog(280);
    const TemporaryDirectory directory;
    Config config = plain_config(directory.path(), Tier::nvme, timing);
    config.budget.host_bytes = std::uint64_t{10} << 20;
    config.budget.device_bytes = std::uint64_t{8} << 20;
    LongRun run(config);
    for (int s = 0; s < 20; ++s) run.step();
    const std::uint64_t early = resident_kib();
    for (int s = 20; s < 500; ++s) run.step();
    const std::uint64_t late = resident_kib();
#ifndef BALLAST_SANITIZED
    EXPECT_LE(static_cast<double>(late), 1.02 * static_cast<double>(early));
#endif
    EXPECT_GT(early, 0u);
    EXPECT_GT(late, 0u);
    EXPECT_EQ(run.engine().step_count({0, 0}), 500u);
    const Report report = run.engine().report();
    // From the second step on all is expected: none but the first few asked for come unannounced.
    EXPECT_GT(static_cast<double>(report.acquires_prefetched), 0.95 * static_cast<double>(report.acquires));
    EXPECT_EQ(report.trace_repairs, 0u);
  }
}

#ifndef BALLAST_SANITIZED
TEST(LongRunTest, AStepInItsStrideAllocatesNothing) {
  for (Timing timing : {Timing::eager, Timing::just_in_time, Timing::after_backward}) {
    SCOPED_TRACE(to_string(timing));
    const TemporaryDirectory directory;
    Config config = plain_config(directory.path(), Tier::nvme, timing);
    config.budget.host_bytes = std::uint64_t{10} << 20;
    config.budget.device_bytes = std::uint64_t{8} << 20;
    config.threads = 1;
    LongRun run(config);
    for (int s = 0; s < 30; ++s) run.step();
    testing::allocations = 0;
    testing::count_allocations = true;
    for (int s = 0; s < 50; ++s) run.step();
    testing::count_allocations = false;
    EXPECT_EQ(testing::allocations.load(), 0u);
  }
}
#endif

}  // namespace
}  // namespace ballast
