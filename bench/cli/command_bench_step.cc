// ballast bench step: whole steps of a synthetic model (gradients computed from the parameters, no matrix products). A
// few steps in a row are paired with raw transfers of the same extents just before them, so that efficiency is a median
// of ratios taken on one machine at one time. The engine reads ahead between steps: raw transfers wait until it is
// quiet, the steps that then run on what it had read are not timed, and only the bytes that it moves while the others
// are timed count. With durable steps the raw transfers are made durable as often as the steps are.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/base/random.h>
#include <ballast/base/size.h>
#include <ballast/engine/engine.h>
#include <ballast/io/small_files.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <numeric>
#include <optional>

#include "command.h"
#include "display.h"
#include "gpt/model.h"
#include "gpu.h"
#include "interrupt.h"
#include "output_file.h"
#include "ranks.h"
#include "run_explained.h"
#include "run_record.h"
#include "storage_bench.h"

namespace ballast::cli {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  EngineOptions engine;
  std::string model;
  std::int64_t steps = 30;
  std::int64_t micro_batches = 1;
  std::uint64_t seed = 0;
  std::string checkpoint;
  std::string json, trace, report;
};

// The units of a GPT without its maths. Forward looks at every parameter, backward writes a gradient for every one.
class SyntheticModel {
 public:
  SyntheticModel(Engine& engine, const gpt::GptShape& shape, std::int64_t micro_batches, std::uint64_t seed)
      : engine_(engine), seed_(seed), stream_(engine.stream()), on_gpu_(stream_.native_handle() != nullptr) {
    for (gpt::GptUnit& unit : gpt::gpt_units(shape)) {
      counts_.push_back(unit.parameters.size());
      units_.push_back(engine.add_unit(std::move(unit.name), std::move(unit.parameters)));
    }
    options_.micro_batches = static_cast<int>(micro_batches);
    std::vector<ExpectedAccess> order;
    for (const UnitId unit : units_) order.push_back({.unit = unit});
    for (std::size_t i = units_.size(); i-- > 0;) order.push_back({.unit = units_[i], .gradient = true});
    engine.expect_order(order, options_.micro_batches);
  }

  void initialize() {
    engine_.initialize([this](ParameterId id, std::int64_t first, std::span<float> values) {
      InterruptGuard::check();
      const std::uint64_t key = base::random_at(seed_, (std::uint64_t{id.unit} << 16) | id.index);
      for (std::size_t i = 0; i < values.size(); ++i) {
        const std::uint64_t bits = base::mix(key + static_cast<std::uint64_t>(first) + i);
        values[i] = static_cast<float>(static_cast<double>(bits >> 40) * 0x1p-24 - 0.5) * 0.04f;
      }
    });
  }

  // The "loss": the mean square of the parameters that forward saw (bf16 ones; every 61st element).
  StepRecord step() {
    StepRecord record;
    sum_ = 0;
    seen_ = 0;
    Step step = engine_.begin_step(options_);
    const auto scale = static_cast<float>(step.loss_scale());
    for (int micro = 0; micro < options_.micro_batches; ++micro) {
      PassScope pass = step.begin_pass();
      for (std::size_t u = 0; u < units_.size(); ++u) {
        ParameterLease lease = engine_.acquire(units_[u], stream_);
        for (std::uint32_t p = 0; p < counts_[u]; ++p) {
          if (on_gpu_) break;  // its parameters are looked at by backward alone
          const Tensor tensor = lease[{units_[u].index, p}];
          stream_.enqueue([this, tensor] { look(tensor); });
        }
        lease.release(stream_);
      }
      for (std::size_t u = units_.size(); u-- > 0;) {
        ParameterLease lease = engine_.acquire(units_[u], stream_);
        GradientLease gradients = engine_.gradients(units_[u], stream_);
        for (std::uint32_t p = 0; p < counts_[u]; ++p) {
          const ParameterId id{units_[u].index, p};
          const Tensor in = lease[id], out = gradients[id];
          if (on_gpu_) {
            differentiate_on_gpu(in, out, scale, stream_);
          } else {
            stream_.enqueue([in, out, scale] { differentiate(in, out, scale); });
          }
        }
        gradients.commit(stream_);
        lease.release(stream_);
      }
    }
    const GradientNorm norm = step.finish_backward();
    if (norm.finite) {
      step.update();
    } else {
      step.discard();
    }
    record.grad_norm = norm.value;
    record.loss = seen_ > 0 ? sum_ / static_cast<double>(seen_) : 0;
    return record;
  }

 private:
  static float value(const Tensor& tensor, std::int64_t i) {
    if (tensor.dtype == DataType::fp32) return static_cast<const float*>(tensor.data)[i];
    const std::uint32_t bits = std::uint32_t{static_cast<const std::uint16_t*>(tensor.data)[i]} << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
  }

  void look(const Tensor& tensor) {
    for (std::int64_t i = 0; i < tensor.elements; i += 61, ++seen_) {
      const double x = value(tensor, i);
      sum_ += x * x;
    }
  }

  // The gradient of half the mean square, scaled. fp16 parameters are read by their bits, as good a number as any.
  static void differentiate(const Tensor& in, const Tensor& out, float scale) {
    if (out.dtype == DataType::fp32 && in.dtype != DataType::fp32) {
      const auto* source = static_cast<const std::uint16_t*>(in.data);
      auto* destination = static_cast<std::uint32_t*>(out.data);
      for (std::int64_t i = 0; i < out.elements; ++i) {
        const std::uint32_t bits = std::uint32_t{source[i]} << 16;
        float x;
        std::memcpy(&x, &bits, sizeof x);
        x *= 0.01f * scale;
        std::memcpy(destination + i, &x, sizeof x);
      }
      return;
    }
    for (std::int64_t i = 0; i < out.elements; ++i) {
      const float x = value(in, i) * (0.01f * scale);
      if (out.dtype == DataType::fp32) {
        static_cast<float*>(out.data)[i] = x;
      } else {
        std::uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        static_cast<std::uint16_t*>(out.data)[i] = static_cast<std::uint16_t>(bits >> 16);
      }
    }
  }

  Engine& engine_;
  std::uint64_t seed_;
  Stream stream_;
  bool on_gpu_;
  StepOptions options_;
  std::vector<UnitId> units_;
  std::vector<std::size_t> counts_;
  double sum_ = 0;
  std::int64_t seen_ = 0;
};

constexpr std::size_t kStepsPerPair = 3;  // at least; beside those that are not timed

std::uint64_t nvme_bytes(const Report& report) {
  return report.lanes[static_cast<std::size_t>(Lane::nvme_read)].bytes +
         report.lanes[static_cast<std::size_t>(Lane::nvme_write)].bytes;
}

double sum(const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

double largest(const std::vector<double>& values) { return *std::max_element(values.begin(), values.end()); }

double median(std::vector<double> values) {
  if (values.empty()) return std::nan("");
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// Raw transfers over the engine's own files: each extent read and written back as it was, in runs as long as a chunk
// of 1 Mi elements. Only while the engine is at rest.
std::unique_ptr<StorageBench> raw_transfers(const Config& config, const Report& report) {
  return std::make_unique<StorageBench>(
      StorageBenchOptions{.files = report.nvme_files,
                          .block_bytes = config.nvme.block_bytes,
                          .queue_depth = config.nvme.queue_depth,
                          .backend = backend_from(report.io_backend),
                          .run_blocks = std::max<std::uint64_t>(1, 12 * base::kMiB / config.nvme.block_bytes)});
}

// What committing a step does beside its transfers, for raw transfers to do as well: the flush, and a small file of the
// same length put in place.
class RawCommits {
 public:
  RawCommits(const Config& config, StorageBench& raw)
      : raw_(raw),
        files_(io::make_small_files(config.nvme.paths.front())),
        every_steps_(config.durability.every_steps) {
    for (const std::string& name : files_->list()) {
      if (name.ends_with(".manifest")) manifest_.resize(files_->read(name).size());
    }
  }
  ~RawCommits() {
    try {
      files_->remove(kName);
    } catch (const IoError&) {
      // It says nothing to anyone.
    }
  }
  RawCommits(const RawCommits&) = delete;
  RawCommits& operator=(const RawCommits&) = delete;

  StorageBench::Result rewrite() {
    // A pass covers both slots of every chunk, twice what a step writes.
    steps_due_ += 2;
    const std::uint64_t commits = every_steps_ == 0 ? 0 : steps_due_ / every_steps_;
    steps_due_ -= commits * every_steps_;
    return raw_.run(StorageBench::Pattern::rewrite, std::max<std::uint64_t>(1, commits), [this, commits] {
      if (commits == 0) return;
      const Clock::time_point begin = Clock::now();
      raw_.flush_seconds();
      io::publish(*files_, kName, manifest_);
      seconds_.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    });
  }
  const std::vector<double>& seconds() const { return seconds_; }  // of each

 private:
  static constexpr const char* kName = "ballast-bench-commit";
  StorageBench& raw_;
  const std::unique_ptr<io::SmallFiles> files_;
  const std::uint64_t every_steps_;  // 0: none is committed
  std::uint64_t steps_due_ = 0;
  std::vector<std::byte> manifest_;
  std::vector<double> seconds_;
};

// Folders for what would outlive the benchmark, committed steps and checkpoints: beside no run of somebody else, and
// gone with this object, which outlives the engine. A rank removes its own files, and whoever is last the folder.
class PassingFolders {
 public:
  explicit PassingFolders(int rank) : mine_("ballast-rank" + std::to_string(rank) + ".") {}
  ~PassingFolders() {
    for (const std::string& folder : folders_) remove(folder);
  }
  PassingFolders(const PassingFolders&) = delete;
  PassingFolders& operator=(const PassingFolders&) = delete;

  std::string add(const std::string& around) {
    folders_.push_back(around + "/ballast-bench-step");
    return folders_.back();
  }

 private:
  void remove(const std::filesystem::path& folder) const {
    std::error_code error;  // what stays is replaced by the next benchmark
    std::vector<std::filesystem::path> inside;
    for (const auto& entry : std::filesystem::directory_iterator(folder, error)) inside.push_back(entry.path());
    for (const std::filesystem::path& path : inside) {
      if (std::filesystem::is_directory(path, error)) remove(path);
      if (path.filename().string().starts_with(mine_)) std::filesystem::remove(path, error);
    }
    std::filesystem::remove(folder, error);
  }

  const std::string mine_;
  std::vector<std::string> folders_;
};

// What a checkpoint that is saved beside training costs: steps with one against as many just before and just after
// without, as a drive's rate drifts; and against reading its bytes and writing them to a new file, durably.
struct SaveCosts {
  std::vector<double> extra_seconds, call_seconds, raw_seconds;
  std::uint64_t bytes = 0;
  std::uint64_t chunks_from_updates = 0, chunks_asked_for = 0;
};

SaveCosts measure_saves(const Options& options, const Config& config, Engine& engine, SyntheticModel& model,
                        StorageBench& raw) {
  constexpr int kTurns = 5, kLeadIn = 2, kSteps = 4;
  SaveCosts costs;
  const auto timed = [&](const auto& work) {
    const Clock::time_point begin = Clock::now();
    work();
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  const auto steps = [&](int count) {
    for (int i = 0; i < count; ++i) {
      InterruptGuard::check();
      model.step();
    }
  };
  for (int turn = 0; turn < kTurns; ++turn) {
    report_at_rest(engine);
    const StorageBench::Result read = raw.run(StorageBench::Pattern::read);
    const Report before = engine.report();
    steps(kLeadIn);
    const double before_it = timed([&] { steps(kSteps); });
    double call = 0;
    const double with = timed([&] {
      call = timed([&] { engine.save_checkpoint(options.checkpoint + "/step-" + std::to_string(turn), 1); });
      steps(kSteps);
      engine.finish_checkpoint();
    });
    const double after_it = timed([&] { steps(kSteps); });
    const Report after = engine.report();
    costs.bytes = after.checkpoint_bytes - before.checkpoint_bytes;
    costs.chunks_from_updates += after.checkpoint_chunks_from_updates - before.checkpoint_chunks_from_updates;
    costs.chunks_asked_for += after.checkpoint_chunks_asked_for - before.checkpoint_chunks_asked_for;
    costs.extra_seconds.push_back(with - (before_it + after_it) / 2);
    costs.call_seconds.push_back(call);
    const std::uint64_t block = config.nvme.block_bytes;
    report_at_rest(engine);
    StorageBench fresh({.paths = {options.checkpoint},
                        .bytes_per_path = std::max(block, costs.bytes / block * block),
                        .block_bytes = block,
                        .queue_depth = config.nvme.queue_depth,
                        .backend = backend_from(engine.report().io_backend)});
    const double written = fresh.prepare().seconds;
    costs.raw_seconds.push_back(static_cast<double>(costs.bytes) / read.bytes_per_second() + written +
                                fresh.flush_seconds());
  }
  return costs;
}

int measure(Options options, Config config, const std::shared_ptr<Communicator>& ranks) {
  for (std::string* file : {&options.json, &options.trace, &options.report}) *file = on_first_rank(*ranks, *file);
  const gpt::GptShape shape = gpt::GptShape::from_file(options.model);
  NamedPaths others = {{"--model", options.model}, {"--engine", options.engine.path()}};
  for (const std::string& path : config.nvme.paths) others.emplace_back("nvme.paths", path);
  require_distinct({{"--json", options.json}, {"--trace", options.trace}, {"--report", options.report}}, others);
  OutputFile json_file(options.json);
  OutputFile trace_file(options.trace);
  OutputFile report_file(options.report);
  EngineEnvironment environment;
  environment.communicator = ranks;
  environment.check_interrupt = &InterruptGuard::check;
  environment.log = [](LogLevel level, std::string_view text) {
    if (level != LogLevel::debug) std::printf("note: %.*s\n", static_cast<int>(text.size()), text.data());
  };
  PassingFolders folders(ranks->rank());
  CommitOptions existing;
  if (config.durability.every_steps > 0) {
    for (std::string& path : config.nvme.paths) path = folders.add(path);
    existing.existing = ExistingRun::overwrite;  // a benchmark's that was killed
  }
  if (!options.checkpoint.empty()) options.checkpoint = existing.checkpoints = folders.add(options.checkpoint);
  Engine engine(config, environment);
  SyntheticModel model(engine, shape, options.micro_batches, options.seed);
  engine.commit(existing);
  model.initialize();
  const Report plan = engine.report();
  std::unique_ptr<StorageBench> raw;
  std::optional<RawCommits> raw_commits;
  if (plan.nvme_stored_bytes > 0) {
    raw = raw_transfers(config, plan);
    raw_commits.emplace(config, *raw);
  }

  RunRecord record;
  record.steady_begin = plan;
  std::vector<double> ratios, raw_rates;  // over all ranks; the slowest one counts
  const auto steps = static_cast<std::size_t>(options.steps);
  for (std::size_t i = 0; i < steps;) {
    // The first steps warm up, alone; then as many in a row as a pair takes.
    const bool warm = i >= warm_up_steps(steps);
    const std::size_t lead_in = warm ? lead_in_steps(steps - i) : 0;
    const bool last = steps - i < 2 * (lead_in + kStepsPerPair);  // what is no pair of its own goes with the last one
    const std::size_t count = !warm ? 1 : last ? steps - i - lead_in : kStepsPerPair;
    const Report quiet = report_at_rest(engine);
    if (i == warm_up_steps(steps)) {
      record.steady_begin = quiet;
      record.steady_begin_ns = now_ns();
    }
    if (raw && !quiet.at_rest) throw Error("the engine did not come to rest, so raw transfers would disturb it");
    ranks->barrier();  // ranks that share a drive measure it together, from the first byte to the last
    StorageBench::Result transferred;
    if (raw && warm) transferred = raw_commits->rewrite();
    ranks->barrier();
    Report begin_report;
    double seconds = 0;
    for (std::size_t k = 0; k < lead_in + count; ++k, ++i) {
      if (k == lead_in) begin_report = engine.report();
      InterruptGuard::check();
      const Clock::time_point begin = Clock::now();
      const std::uint64_t begin_ns = now_ns();
      StepRecord step = model.step();
      step.window = {begin_ns, now_ns()};
      step.timed = warm && k >= lead_in;
      step.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
      if (k >= lead_in) seconds += step.seconds;
      record.steps.push_back(step);
    }
    const Report end_report = engine.report();
    if (warm) record.timed.add(begin_report, end_report, count, seconds);
    if (!raw || !warm) continue;
    const double moved = sum(from_all(*ranks, static_cast<double>(nvme_bytes(end_report) - nvme_bytes(begin_report))));
    const double raw_bytes = sum(from_all(*ranks, static_cast<double>(transferred.bytes)));
    const double raw_seconds = largest(from_all(*ranks, transferred.seconds));
    raw_rates.push_back(raw_bytes / raw_seconds);
    ratios.push_back(moved / raw_rates.back() / largest(from_all(*ranks, seconds)));
  }
  record.end = report_at_rest(engine);
  RunReport run{.title = "ballast bench step, " + std::filesystem::path(options.model).filename().string()};
  explain(engine, record, &run);  // before saves, whose steps are not of the run
  std::optional<SaveCosts> saves;
  if (!options.checkpoint.empty()) saves = measure_saves(options, config, engine, model, *raw);
  engine.settle();
  gather_seconds(*ranks, record);
  if (raw) {
    const double rate = median(raw_rates) / ranks->world_size();  // of this rank
    record.rates = StorageRates{rate, rate, rate, raw->direct()};
  }
  const double efficiency = raw ? median(ratios) : record.efficiency();
  const auto parameters = static_cast<double>(record.end.parameters);
  const double share = parameters / record.end.world_size;  // of this rank
  const auto per_parameter = [&](Lane lane) { return fixed_text(record.bytes_per_step(lane) / share, 2); };
  std::vector<std::pair<std::string, std::string>> rows = {
      {"parameters", count_text(parameters)},
      {"step", fixed_text(record.steady_step_seconds() * 1e3, 1) + " ms, timing " + record.end.timing +
                   (raw ? ", " + record.end.io_backend : "")},
      {"NVMe bytes per parameter and step",
       per_parameter(Lane::nvme_read) + " read + " + per_parameter(Lane::nvme_write) + " written"},
      {"efficiency", fixed_text(efficiency, 3) + (raw ? " (median of raw time over step time, pair by pair)" : "")}};
  if (raw) {
    const auto [low, high] = std::minmax_element(ratios.begin(), ratios.end());
    rows.push_back({"efficiency, lowest and highest pair", fixed_text(*low, 3) + " to " + fixed_text(*high, 3)});
    rows.push_back({ranks->world_size() > 1 ? "raw mixed rate of all ranks, median" : "raw mixed rate, median",
                    rate_text(median(raw_rates))});
  }
  if (raw && !raw_commits->seconds().empty())
    rows.push_back({"flush and manifest of the raw transfers, median",
                    fixed_text(median(raw_commits->seconds()) * 1e3, 1) + " ms, once for each step's bytes"});
  if (saves) {
    const auto range = [](const std::vector<double>& values) {
      const auto [low, high] = std::minmax_element(values.begin(), values.end());
      return fixed_text(median(values) * 1e3, 1) + " ms (" + fixed_text(*low * 1e3, 1) + " to " +
             fixed_text(*high * 1e3, 1) + ")";
    };
    rows.push_back({"a checkpoint's bytes", base::format_size(saves->bytes)});
    rows.push_back({"save_checkpoint returns after", range(saves->call_seconds)});
    rows.push_back({"more time for the steps beside it", range(saves->extra_seconds)});
    rows.push_back({"its bytes raw: read, written anew, flushed", range(saves->raw_seconds)});
  }
  if (ranks->world_size() > 1)
    rows.push_back({"step, fastest and slowest rank", seconds_range(record.rank_step_seconds) + "; their drives busy " +
                                                          seconds_range(record.rank_nvme_seconds)});
  print_table(rows);
  print_limit(run);
  if (trace_file.wanted()) {
    engine.write_trace(trace_file.temporary_path());
    trace_file.publish();
  }
  if (json_file.wanted() || report_file.wanted()) {
    nlohmann::ordered_json& out = run.figures;
    out = to_json(record);
    out["limit"] = to_json(run.limit);
    out["efficiency"] = finite_or_null(efficiency);
    out["efficiency_pairs"] = ratios;
    out["raw_mixed_bytes_per_second"] = raw_rates;
    if (raw) out["raw_commit_seconds"] = raw_commits->seconds();
    if (saves) {
      out["checkpoint"] = {{"bytes", saves->bytes},
                           {"call_seconds", saves->call_seconds},
                           {"extra_seconds", saves->extra_seconds},
                           {"raw_seconds", saves->raw_seconds},
                           {"chunks_from_updates", saves->chunks_from_updates},
                           {"chunks_asked_for", saves->chunks_asked_for}};
    }
    out["model"] = options.model;
    out["micro_batches"] = options.micro_batches;
    out["seed"] = options.seed;
    out["configuration"] = nlohmann::ordered_json::parse(config.to_json());
    publish(run, json_file, report_file);
  }
  return 0;
}

int run(const Options& options) {
  Config config = options.engine.load();
  if (config.learning_rate_schedule.needs_total())
    config.learning_rate_schedule.total_num_steps = std::uint64_t{1} << 40;  // its rates train nothing
  if (!options.checkpoint.empty() && config.durability.every_steps != 1)
    throw ConfigError("--checkpoint measures a save beside training, which needs durable steps: --set durability=step");
  return run_on_ranks(config,
                      [&](const std::shared_ptr<Communicator>& ranks) { return measure(options, config, ranks); });
}

}  // namespace

Command add_bench_step(CLI::App& bench) {
  auto options = std::make_shared<Options>();
  CLI::App* parser = bench.add_subcommand("step", "Whole steps of a synthetic model, against raw transfers");
  parser->add_option("--model", options->model, "Shape of the model, JSON")->type_name("FILE")->required();
  options->engine.add_to(*parser, true);
  const auto positive = CLI::Range(std::int64_t{1}, std::int64_t{1} << 40).description("");  // told when it is broken
  parser->add_option("--steps", options->steps, "Optimizer steps")
      ->type_name("N")
      ->check(positive)
      ->capture_default_str();
  parser->add_option("--micro-batches", options->micro_batches, "Passes per step")
      ->type_name("K")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30))
      ->capture_default_str();
  parser->add_option("--seed", options->seed, "Of the initial parameters")
      ->type_name("S")
      ->check(whole_number())
      ->capture_default_str();
  parser
      ->add_option("--checkpoint", options->checkpoint,
                   "Then also save checkpoints there while steps go on, and tell what that costs (durable steps)")
      ->type_name("DIR");
  parser->add_option("--json", options->json, "Write all figures to FILE")->type_name("FILE");
  parser->add_option("--trace", options->trace, "Write a timeline for Perfetto to FILE")->type_name("FILE");
  parser->add_option("--report", options->report, "Write where the time went to FILE, a page for any browser")
      ->type_name("FILE");
  return {parser, [options] { return run(*options); }};
}

}  // namespace ballast::cli
