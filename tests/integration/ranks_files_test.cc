// Models and worlds that are seldom: fewer elements than ranks, none at all, scalars, all frozen; trained, saved,
// loaded by other worlds and other models, exported. And what a set of files must be to be taken for one checkpoint.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/engine/checkpoint.h>
#include <ballast/engine/safetensors.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <numeric>

#include "executor.h"
#include "support/durable_runs.h"
#include "support/on_ranks.h"
#include "support/safetensors_support.h"

// GCC 12 takes the strings of temporaries that are handed on for uninitialised.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace ballast::testing {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr Tier kTiers[] = {Tier::device, Tier::host, Tier::nvme};

std::int64_t elements_of(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

// Every operation has bytes.
class WatchedStorage final : public io::Storage {
 public:
  WatchedStorage(std::unique_ptr<io::Storage> inner, std::atomic<int>& empty)
      : inner_(std::move(inner)), empty_(empty) {}
  std::uint32_t add_file(int descriptor) override { return inner_->add_file(descriptor); }
  bool register_memory(std::span<std::byte> memory, std::string* reason) override {
    return inner_->register_memory(memory, reason);
  }
  void submit(std::span<io::Operation* const> operations) override {
    for (const io::Operation* each : operations) empty_ += each->bytes == 0;
    inner_->submit(operations);
  }
  std::size_t poll(std::span<io::Operation*> finished, bool wait) override { return inner_->poll(finished, wait); }
  void cancel(io::Operation& operation) override { inner_->cancel(operation); }
  int flush(std::uint32_t file) override { return inner_->flush(file); }
  std::size_t outstanding() const override { return inner_->outstanding(); }
  std::uint64_t alignment_bytes() const override { return inner_->alignment_bytes(); }
  std::string_view name() const override { return inner_->name(); }
  const io::StorageCounters& counters() const override { return inner_->counters(); }

 private:
  const std::unique_ptr<io::Storage> inner_;
  std::atomic<int>& empty_;
};

class RanksFiles : public ::testing::Test {
 protected:
  // Every rank takes the micro-batch of its number; what one rank that takes all of them adds in the same order.
  Outcome on(int world_size, const Config& config, const std::vector<SyntheticUnit>& model, Course course) {
    std::vector<Outcome> runs(static_cast<std::size_t>(world_size));
    course.synthetic.micro_stride = world_size;
    on_ranks(world_size, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
      Course mine = course;
      mine.synthetic.micro_offset = rank;
      mine.environment.communicator = communicator;
      mine.environment.test_hooks = hooks_;
      runs[static_cast<std::size_t>(rank)] = run(config, model, mine);
    });
    for (const Outcome& each : runs) {
      EXPECT_EQ(each.values, runs.front().values);
      EXPECT_EQ(each.counts, runs.front().counts);
    }
    return runs.front();
  }
  Outcome alone(int micro_batches, const std::vector<SyntheticUnit>& model, Course course) {
    course.synthetic.micro_batches = micro_batches;
    return run(plain_config(path_ + "/alone", Tier::host, Timing::after_backward), model, course);
  }
  Config config(Tier tier) const { return plain_config(path_ + "/run", tier, Timing::just_in_time); }

  // Exports, and compares names, shapes, the file's size and the values, whose order is that of the model.
  void expect_export(const std::string& checkpoint, const std::vector<SyntheticUnit>& model,
                     const std::vector<float>& values) {
    const std::string folder = path_ + "/export";
    std::filesystem::remove_all(folder);
    CheckpointReader reader({checkpoint});
    reader.verify();
    export_safetensors(reader, folder, {.exact = true});
    SafetensorsReader exported(folder);
    std::vector<float> found;
    std::size_t tensors = 0;
    for (const SyntheticUnit& unit : model) {
      for (const ParameterSpec& parameter : unit.parameters) {
        const auto index = exported.find(unit.name + "." + parameter.name);
        ASSERT_TRUE(index) << unit.name << "." << parameter.name;
        EXPECT_EQ(exported.tensors()[*index].shape, parameter.shape);
        std::vector<float> part(static_cast<std::size_t>(elements_of(parameter.shape)));
        exported.read(*index, 0, part);
        found.insert(found.end(), part.begin(), part.end());
        ++tensors;
      }
    }
    EXPECT_EQ(exported.tensors().size(), tensors);
    EXPECT_EQ(found, values);
    const std::string bytes = bytes_of(folder + "/model.safetensors");
    std::uint64_t header = 0;
    std::memcpy(&header, bytes.data(), sizeof header);
    EXPECT_EQ(bytes.size(), 8 + header + 4 * values.size());
  }

  const Watchdog watchdog_{300};
  const TemporaryDirectory directory_;
  const std::string path_ = directory_.path(), saves_ = path_ + "/saves";
  std::shared_ptr<engine::TestHooks> hooks_ = std::make_shared<engine::TestHooks>();
};

TEST_F(RanksFiles, FewerElementsThanRanksAreTrainedSavedLoadedAndExported) {
  const std::vector<SyntheticUnit> model = {{"u", {{"five", {5}}, {"one", {1}}}}, {"v", {{"three", {3}}}}};
  const Outcome half = alone(8, model, {.steps = 2}), whole = alone(8, model, {.steps = 4});
  for (const Tier tier : kTiers) {
    SCOPED_TRACE(to_string(tier));
    const std::string saved = saves_ + "-" + std::string(to_string(tier)) + "/step-2";
    EXPECT_EQ(on(8, config(tier), model, {.steps = 2, .save_to = saved}).values, half.values);
    expect_export(saved, model, half.values);
    const Outcome next = on(8, config(tier), model, {.steps = 4, .options = {ExistingRun::resume, saved}});
    EXPECT_EQ(next.resumed_at, 2U);
    EXPECT_EQ(next.values, whole.values);
    EXPECT_EQ(next.counts, whole.counts);
  }
}

TEST_F(RanksFiles, EmptyParametersAndScalarsKeepTheirShapesAndMoveNoEmptyRequest) {
  const std::vector<SyntheticUnit> model = {
      {"mixed", {{"first", {0}}, {"w", {5}}, {"middle", {8, 0}}, {"scalar", {}}, {"one", {1}}, {"last", {0, 3, 4}}}},
      {"none", {{"only", {0}}}},
      {"last", {{"w", {7, 3}}, {"nothing", {8, 0}}}}};
  std::atomic<int> empty{0};
  hooks_->storage_factory = [&](io::Backend backend, const io::StorageOptions& options, const std::string&) {
    io::OpenedStorage opened = io::open_storage(backend, options);
    opened.storage = std::make_unique<WatchedStorage>(std::move(opened.storage), empty);
    return opened;
  };
  hooks_->checkpoint_storage = hooks_->storage_factory;
  for (const int world_size : {1, 2}) {
    SCOPED_TRACE(world_size);
    const std::string saved = saves_ + "/" + std::to_string(world_size) + "/step-2";
    const Outcome half = alone(world_size, model, {.steps = 2}), whole = alone(world_size, model, {.steps = 4});
    EXPECT_EQ(on(world_size, config(Tier::nvme), model, {.steps = 2, .save_to = saved}).values, half.values);
    CheckpointReader reader({saved});
    ASSERT_EQ(reader.parameters().size(), 9U);
    for (std::size_t i = 0; i < 6; ++i)
      EXPECT_EQ(reader.parameters()[i].shape, model[0].parameters[i].shape) << reader.parameters()[i].name;
    expect_export(saved, model, half.values);
    const Outcome next =
        on(world_size, config(Tier::nvme), model, {.steps = 4, .options = {ExistingRun::resume, saved}});
    EXPECT_EQ(next.values, whole.values);
    EXPECT_EQ(next.counts, whole.counts);
    SafetensorsReader source(path_ + "/export");
    import_safetensors(source,
                       {{"mixed", model[0].parameters}, {"none", model[1].parameters}, {"last", model[2].parameters}},
                       path_ + "/imported/step-0");
    expect_export(path_ + "/imported/step-0", model, half.values);
  }
  EXPECT_EQ(empty, 0);
}

// Memory is filled with NaN beforehand: padding is in every rank's part but the first's.
TEST_F(RanksFiles, PaddingFullOfNanShowsNowhere) {
  hooks_->memory_fill = 0xFF;
  const std::vector<ParameterSpec> parameters = {{"p", {10}}};
  for (const int world_size : {3, 4}) {
    for (const Tier tier : kTiers) {
      SCOPED_TRACE(std::to_string(world_size) + " " + std::string(to_string(tier)));
      const auto trained = [&](const std::shared_ptr<Communicator>& communicator, int micro_batches, const Config& c) {
        EngineEnvironment environment;
        environment.communicator = communicator;
        environment.test_hooks = hooks_;
        Engine engine(c, environment);
        const UnitId unit = engine.add_unit("u", parameters);
        engine.commit();
        engine.initialize([](ParameterId, std::int64_t first, std::span<float> values) {
          for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(first) + static_cast<float>(i);
        });
        Stream stream = engine.stream();
        for (int s = 0; s < 2; ++s) {
          auto step = engine.begin_step({.micro_batches = micro_batches});
          for (int m = 0; m < micro_batches; ++m) {
            auto pass = step.begin_pass();
            auto lease = engine.acquire(unit, stream);
            auto gradients = engine.gradients(unit, stream);
            stream.enqueue([out = static_cast<float*>(gradients[{0, 0}].data)] { std::iota(out, out + 10, 0.0F); });
            gradients.commit(stream);
            lease.release(stream);
          }
          EXPECT_EQ(step.finish_backward().value, std::sqrt(285.0));
          step.update();
        }
        std::vector<float> values(10), seen(10);
        engine.read({0, 0}, 0, values);
        {
          auto pass = engine.begin_pass({.kind = Pass::evaluate});
          auto lease = engine.acquire(unit, stream);
          lease.wait();
          const auto* const bits = static_cast<const std::uint16_t*>(lease[{0, 0}].data);
          std::transform(bits, bits + 10, seen.begin(), bf16_value);
        }
        for (std::size_t i = 0; i < 10; ++i) EXPECT_NEAR(seen[i], values[i], 0.004F * std::abs(values[i]));
        engine.save_checkpoint(saves_ + "/step-2");
        return values;
      };
      const std::vector<float> expected =
          trained(nullptr, world_size, plain_config(path_, tier, Timing::after_backward));
      EXPECT_NE(expected[9], 9.0F);
      on_ranks(world_size, [&](int, const std::shared_ptr<Communicator>& communicator) {
        EXPECT_EQ(trained(communicator, 1, config(tier)), expected);
      });
      expect_export(saves_ + "/step-2", {{"u", parameters}}, expected);
    }
  }
}

TEST_F(RanksFiles, FourRanksSaveAndAnyNumberGoesOnBitForBit) {
  const std::vector<SyntheticUnit> model = small_model(3);
  const std::string saved = saves_ + "/step-3", other = path_ + "/other/step-3";
  EXPECT_EQ(on(4, config(Tier::nvme), model, {.steps = 3, .save_to = saved}).values,
            alone(4, model, {.steps = 3, .save_to = other}).values);
  for (const int world_size : {1, 2, 3, 6, 8}) {
    SCOPED_TRACE(world_size);
    // As one rank that was never interrupted: the rest of its micro-batches are those of this world.
    const Outcome expected = alone(world_size, model, {.steps = 8, .options = {ExistingRun::resume, other}});
    const Outcome next =
        on(world_size, config(Tier::nvme), model, {.steps = 8, .options = {ExistingRun::resume, saved}});
    EXPECT_EQ(next.resumed_at, 3U);
    EXPECT_EQ(next.values, expected.values);
    EXPECT_EQ(next.counts, expected.counts);
  }
}

TEST_F(RanksFiles, ASetOfFilesThatIsNotWholeOrNotOneSaveIsRefusedByName) {
  const std::vector<SyntheticUnit> model = small_model(2);
  const std::string earlier = saves_ + "/step-2", saved = saves_ + "/step-3", foreign = path_ + "/foreign/step-3";
  on(4, config(Tier::host), model, {.steps = 2, .save_to = earlier});
  on(4, config(Tier::host), model, {.steps = 3, .save_to = saved});
  on(4, config(Tier::host), model, {.steps = 3, .save_to = foreign});
  const std::string good = path_ + "/good";
  std::filesystem::copy(saved, good);
  const auto chunks = [&](const std::string& folder, int rank) {
    return folder + "/ballast-rank" + std::to_string(rank) + ".chunks";
  };
  const auto manifest = [&](const std::string& folder, int rank, int step = 3) {
    return folder + "/ballast-rank" + std::to_string(rank) + ".step-" + std::to_string(step) + ".manifest";
  };
  const auto copy = [](const std::string& from, const std::string& to) {
    std::filesystem::copy_file(from, to, std::filesystem::copy_options::overwrite_existing);
  };
  const auto cut = [](const std::string& file) {
    std::filesystem::resize_file(file, std::filesystem::file_size(file) - 1);
  };
  const std::string place = path_ + "/tried/step-3";
  struct Trial {
    std::string why, file;
    std::function<void()> harm;
  };
  const std::vector<Trial> trials = {
      {"cannot be opened", chunks(place, 2), [&] { std::filesystem::remove(chunks(place, 2)); }},
      {"manifest of rank 2 is missing", manifest(place, 2), [&] { std::filesystem::remove(manifest(place, 2)); }},
      {"not what was written there", chunks(place, 0), [&] { copy(chunks(earlier, 0), chunks(place, 0)); }},
      {"of step 2", manifest(place, 1), [&] { copy(manifest(earlier, 1, 2), manifest(place, 1)); }},
      {"of another one than rank 0's", manifest(place, 3),
       [&] {
         copy(chunks(foreign, 3), chunks(place, 3));
         copy(manifest(foreign, 3), manifest(place, 3));
       }},
      {"is of rank 7, and the run had 4 ranks", manifest(place, 7),
       [&] {
         copy(chunks(place, 3), chunks(place, 7));
         copy(manifest(place, 3), manifest(place, 7));
       }},
      {"cut short", chunks(place, 1), [&] { cut(chunks(place, 1)); }},
      {"", manifest(place, 1), [&] { cut(manifest(place, 1)); }},
  };
  for (const Trial& trial : trials) {
    SCOPED_TRACE(trial.why + " " + trial.file);
    std::filesystem::remove_all(path_ + "/tried");
    std::filesystem::create_directories(path_ + "/tried");
    std::filesystem::copy(good, place);
    CheckpointReader({place}).verify();
    trial.harm();
    std::string read, loaded;
    try {
      CheckpointReader reader({place});
      export_safetensors(reader, path_ + "/never");
      reader.verify();
    } catch (const Error& error) {
      read = error.what();
    }
    EXPECT_THAT(read, AllOf(HasSubstr(trial.why), HasSubstr(trial.file)));
    EXPECT_FALSE(std::filesystem::exists(path_ + "/never/model.safetensors"));
    for (const int world_size : {4, 1}) {
      try {
        on(world_size, config(Tier::host), model, {.steps = 3, .options = {ExistingRun::resume, place}});
      } catch (const CorruptionError& error) {
        loaded = error.what();
      }
      EXPECT_THAT(loaded, HasSubstr("nothing whole to go on from"));
      if (world_size == 1) {
        EXPECT_THAT(loaded, AllOf(HasSubstr(trial.why), HasSubstr(trial.file)));
      }
    }
  }
}

// A tied parameter is one, used twice; two that happen to be equal stay two.
TEST_F(RanksFiles, EqualParametersAreNotTakenForOneAndATiedOneIsStoredOnce) {
  const std::vector<SyntheticUnit> model = {{"table", {{"tokens", {9, 4}}}}, {"x", {{"a", {6}}, {"b", {6}}}}};
  const std::string saved = saves_ + "/step-0";
  on_ranks(2, [&](int, const std::shared_ptr<Communicator>& communicator) {
    Engine engine(config(Tier::nvme), {.communicator = communicator});
    SyntheticTrainer trainer(engine, model, {.tied = true});
    engine.commit();
    engine.initialize(
        [](ParameterId, std::int64_t, std::span<float> values) { std::fill(values.begin(), values.end(), 0.5F); });
    engine.save_checkpoint(saved);
  });
  expect_export(saved, model, std::vector<float>(48, 0.5F));
  SafetensorsReader source(path_ + "/export");
  import_safetensors(source, {{"table", model[0].parameters}, {"x", model[1].parameters}}, path_ + "/imported/step-0");
  on_ranks(2, [&](int, const std::shared_ptr<Communicator>& communicator) {
    Engine engine(config(Tier::nvme), {.communicator = communicator});
    SyntheticTrainer trainer(engine, model, {.tied = true});
    engine.commit({ExistingRun::resume, path_ + "/imported"});
    ASSERT_TRUE(trainer.resume());
    const std::vector<float> before = trainer.values();
    EXPECT_THAT(before, Each(0.5F));
    trainer.step();
    const std::vector<float> after = trainer.values();
    for (std::size_t i = 0; i < after.size(); ++i) EXPECT_NE(after[i], before[i]) << i;
    EXPECT_EQ(engine.step_count({0, 0}), 1U);
  });
}

TEST_F(RanksFiles, ExportsAreWholeWhateverIsHeldAndRightAfterLoading) {
  const std::vector<SyntheticUnit> model = small_model(2);
  for (const int world_size : {1, 2, 3}) {
    for (const Tier tier : kTiers) {
      SCOPED_TRACE(std::to_string(world_size) + " " + std::string(to_string(tier)));
      std::filesystem::remove_all(saves_);
      std::vector<float> values;
      on_ranks(world_size, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
        Engine engine(config(tier), {.communicator = communicator});
        SyntheticTrainer trainer(engine, model);
        engine.commit();
        trainer.initialize();
        trainer.step();
        engine.save_checkpoint(saves_ + "/released");
        ParameterLease held;
        {
          auto pass = engine.begin_pass({.kind = Pass::evaluate});
          held = engine.acquire(trainer.ids()[1], engine.stream());
          EXPECT_THROW(engine.save_checkpoint(saves_ + "/within"), UsageError);
        }
        engine.save_checkpoint(saves_ + "/held");
        held.release();
        const std::vector<float> mine = trainer.values();
        if (rank == 0) values = mine;
      });
      on_ranks(world_size, [&](int, const std::shared_ptr<Communicator>& communicator) {
        Engine engine(config(tier), {.communicator = communicator});
        SyntheticTrainer trainer(engine, model);
        engine.commit({ExistingRun::resume, saves_ + "/held"});
        ASSERT_TRUE(trainer.resume());
        engine.save_checkpoint(saves_ + "/loaded");
      });
      for (const char* name : {"/released", "/held", "/loaded"}) expect_export(saves_ + name, model, values);
      EXPECT_FALSE(std::filesystem::exists(saves_ + "/within"));
    }
  }
}

}  // namespace
}  // namespace ballast::testing
