// ballast train: the reference GPT on the bytes of any file.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/base/size.h>
#include <ballast/engine/checkpoint.h>
#include <ballast/engine/engine.h>
#include <ballast/offload/topology.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>

#include "command.h"
#include "display.h"
#include "gpt/trainer.h"
#include "interrupt.h"
#include "output_file.h"
#include "ranks.h"
#include "run_explained.h"
#include "run_record.h"

namespace ballast::cli {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  EngineOptions engine;
  std::string model;
  std::vector<std::string> data, validation_data;
  std::string tokens;
  double validation_split = 0;
  std::int64_t validate_every = 0, validation_batches = 4;
  std::int64_t steps = 100;
  std::optional<std::int64_t> batch;
  std::int64_t sequence = 128;
  std::optional<std::int64_t> micro_batches;
  std::string order = "horizontal";
  std::optional<double> learning_rate;
  std::uint64_t seed = 0;
  std::string checkpoint;
  std::int64_t every = 0;
  bool resume = false;
  bool overwrite = false;
  std::string json, log, trace, report;
};

// What the kernel would end the process for is refused.
void admit_memory(std::uint64_t bytes) {
  constexpr std::uint64_t kHeadroomBytes = 16 * base::kMiB;  // for page tables and heap
  const std::uint64_t free = offload::free_memory_bytes(offload::discover_topology());
  if (bytes <= free && free - bytes >= kHeadroomBytes) return;
  throw PlanError("activations and batches of " + base::format_size(bytes) + " do not fit the " +
                  base::format_size(free) +
                  " of memory that are free; take a smaller --batch or --sequence, or more --micro-batches");
}

gpt::TrainSettings settings_of(const Options& options, const Config& config, Communicator& ranks) {
  gpt::TrainSettings settings;
  settings.world_size = ranks.world_size();
  settings.rank = ranks.rank();
  settings.threads = threads_of_maths(ranks);
  const BatchSizes sizes = batch_sizes(config, options.batch, options.micro_batches, settings.world_size);
  settings.batch = sizes.sequences;
  settings.micro_batches = sizes.micro_batches;
  settings.sequence = options.sequence;
  settings.order = options.order == "vertical" ? gpt::MicroBatchOrder::vertical : gpt::MicroBatchOrder::horizontal;
  settings.seed = options.seed;
  settings.admit_memory = admit_memory;
  return settings;
}

void check(const Options& options) {
  if (options.every != 0 && options.checkpoint.empty())
    throw ConfigError("--every says how often to save, and nothing says where: give --checkpoint DIR");
  if (options.validate_every == 0 && !options.validation_data.empty())
    throw ConfigError("--validation-data says on what to validate, and nothing says when: give --validate-every N");
  if (options.validation_split > 0 && !options.validation_data.empty())
    throw ConfigError("--validation-data and --validation-split exclude each other");
  if (options.resume && options.overwrite) throw ConfigError("--resume and --overwrite exclude each other");
  if (options.learning_rate &&
      !(std::isfinite(static_cast<float>(*options.learning_rate)) && *options.learning_rate >= 0))
    throw ConfigError("--learning-rate must be a finite number, 0 or more");
}

// The data that is kept from training, or that training draws from, too; and the losses on it.
struct Validation {
  std::shared_ptr<const gpt::TokenData> data;  // nothing: the training data
  std::string unit = "byte";
  std::vector<std::uint64_t> steps;  // after which, counted from the run's beginning
  std::vector<double> losses;
};

std::string of_budget(std::uint64_t peak, std::uint64_t budget) {
  return base::format_size(peak) + " of " + base::format_size(budget);
}

void print_opening(const Options& options, const Report& report, const gpt::TokenData& data,
                   const gpt::GptTrainer& trainer) {
  const std::string size = data.type() == gpt::TokenType::u8 ? base::format_size(data.tokens())
                                                             : count_text(static_cast<double>(data.tokens())) +
                                                                   " tokens of " + to_string(data.type());
  std::printf("%s: %s parameters; %s: %s\n", options.model.c_str(),
              count_text(static_cast<double>(report.parameters)).c_str(), data.path().c_str(), size.c_str());
  std::printf("device %s, placement %s, timing %s, %d engine thread%s, ZeRO stage %d", report.device.c_str(),
              report.placement.c_str(), report.timing.c_str(), report.threads, report.threads == 1 ? "" : "s",
              report.zero_stage);
  std::printf(report.world_size > 1 ? ", %d ranks\n" : "\n", report.world_size);
  if (report.nvme_stored_bytes > 0)
    std::printf("NVMe: %s stored, moved by %s\n", base::format_size(report.nvme_stored_bytes).c_str(),
                report.io_backend.c_str());
  std::printf("%s; %s of activations\n", trainer.maths_note().c_str(),
              base::format_size(trainer.activation_bytes()).c_str());
  std::fflush(stdout);
}

void print_closing(const RunRecord& record, const Validation& validation) {
  const Report& report = record.end;
  if (record.steps.empty()) {
    std::printf("all %llu steps had been made before\n", static_cast<unsigned long long>(record.first_step));
    return;
  }
  const std::size_t last = std::min<std::size_t>(10, record.steps.size());
  double recent = 0;
  for (std::size_t i = record.steps.size() - last; i < record.steps.size(); ++i)
    recent += record.steps[i].loss / static_cast<double>(last);
  const double parameters = static_cast<double>(report.parameters) / report.world_size;  // of this rank
  const auto per_parameter = [&](Lane lane) { return fixed_text(record.bytes_per_step(lane) / parameters, 2); };
  std::vector<std::pair<std::string, std::string>> rows = {
      {"loss, nats per " + validation.unit, fixed_text(record.steps.front().loss, 3) + " -> " + fixed_text(recent, 3) +
                                                " (mean of the last " + std::to_string(last) + ")"},
      {"tokens/s", fixed_text(record.tokens_per_second(), 0)},
      {"NVMe bytes per parameter and step",
       per_parameter(Lane::nvme_read) + " read + " + per_parameter(Lane::nvme_write) + " written"},
      {"efficiency (bound / actual)", fixed_text(record.efficiency(), 2) + ", bound by " + record.bounding_lane() +
                                          "; " + fixed_text(record.steady_step_seconds() * 1e3, 1) + " ms a step"},
      {"peak device memory", of_budget(report.peak_device_bytes, report.budget_device_bytes)},
      {"peak host memory", of_budget(report.peak_host_bytes, report.budget_host_bytes)},
      {"peak resident set", base::format_size(peak_resident_bytes())}};
  if (!validation.losses.empty())
    rows.insert(rows.begin() + 1,
                {"validation loss, nats per " + validation.unit,
                 fixed_text(validation.losses.front(), 3) + " -> " + fixed_text(validation.losses.back(), 3)});
  if (record.rates)
    rows.push_back({"NVMe rates measured at start", rate_text(record.rates->read_bytes_per_second) + " read, " +
                                                        rate_text(record.rates->write_bytes_per_second) + " written, " +
                                                        rate_text(record.rates->mixed_bytes_per_second) + " mixed" +
                                                        (record.rates->direct ? "" : " (no direct I/O: memory)")});
  if (report.steps_discarded > 0)
    rows.push_back({"steps discarded (gradients not finite)", std::to_string(report.steps_discarded)});
  if (report.world_size > 1)
    rows.push_back({"step, fastest and slowest rank", seconds_range(record.rank_step_seconds) + "; their drives busy " +
                                                          seconds_range(record.rank_nvme_seconds)});
  print_table(rows);
}

// Nothing, with a note, where the paths have no room left for the measurement: training itself can go on. The ranks
// measure side by side, and one that cannot still meets the others.
std::optional<StorageRates> rates_of(const Config& config, const std::string& backend, Communicator& ranks) {
  int meetings = 0;
  const auto meet = [&] {
    ++meetings;
    ranks.barrier();
  };
  try {
    return measure_storage_rates(config.nvme.paths, config.nvme.block_bytes, config.nvme.queue_depth, backend,
                                 ranks.world_size(), meet);
  } catch (const Error& error) {
    while (meetings < kRatePasses) meet();
    std::printf("note: the rates of the NVMe paths are not measured, and efficiency is not told: %s\n", error.what());
    return std::nullopt;
  }
}

std::string log_line(std::uint64_t index, const StepRecord& step, bool updated, bool scheduled,
                     std::optional<double> validation_loss) {
  nlohmann::ordered_json line;
  line["step"] = index;
  line["loss"] = finite_or_null(step.loss);
  line["grad_norm"] = finite_or_null(step.grad_norm);
  line["seconds"] = finite_or_null(step.seconds);
  if (scheduled) line["learning_rate"] = step.learning_rate;
  if (validation_loss) line["validation_loss"] = finite_or_null(*validation_loss);
  if (!updated) line["discarded"] = true;
  return line.dump();
}

// `done` of `steps` that this process runs; `index` counts from the run's beginning.
std::string progress_line(std::uint64_t index, std::uint64_t done, std::uint64_t steps, const StepRecord& step,
                          double seconds, std::uint64_t tokens) {
  char text[160];
  std::snprintf(text, sizeof text, "step %llu/%llu  loss %.4f  norm %.3f  %s tokens/s  %.0f s left",
                static_cast<unsigned long long>(index), static_cast<unsigned long long>(index + steps - done),
                step.loss, step.grad_norm, count_text(static_cast<double>(tokens) / step.seconds).c_str(),
                seconds / static_cast<double>(done) * static_cast<double>(steps - done));
  return text;
}

// Checkpoints that stay; each is whole by itself.
constexpr std::size_t kCheckpointsKept = 3;

std::string checkpoint_path(const Options& options, std::uint64_t steps) {
  return options.checkpoint + "/step-" + std::to_string(steps);
}

void save_due(const Options& options, Engine& engine, std::uint64_t steps, bool last, Progress& progress) {
  if (options.checkpoint.empty()) return;
  if (!last && (options.every == 0 || steps % static_cast<std::uint64_t>(options.every) != 0)) return;
  const std::string path = checkpoint_path(options, steps);
  // Older ones are whole, and the run itself is not harmed: it goes on, but says so; what is saved last must be whole.
  const auto warn = [&](const IoError& error) {
    progress.finish();
    std::fprintf(stderr, "ballast: warning: %s\n", error.what());
  };
  try {
    engine.finish_checkpoint();  // the one before, which may have been written until now
  } catch (const IoError& error) {
    warn(error);
  }
  try {
    engine.save_checkpoint(path, kCheckpointsKept);
  } catch (const IoError& error) {
    if (last) throw;
    warn(error);
  }
}

// The same batches every time, over all ranks.
double validate(const Options& options, Communicator& ranks, gpt::GptTrainer& trainer, const gpt::TokenData* data) {
  double sum = 0;
  for (std::int64_t i = 0; i < options.validation_batches; ++i)
    sum += agree(ranks, trainer.evaluate(static_cast<std::uint64_t>(i), data), InterruptGuard::seen()).mean;
  return sum / static_cast<double>(options.validation_batches);
}

// Runs the steps. Throws Interrupted between two of them.
void run_steps(const Options& options, Communicator& ranks, Engine& engine, gpt::GptTrainer& trainer, LineLog& log,
               Progress& progress, RunRecord* record, Validation* validation) {
  const std::uint64_t first = record->first_step;
  const auto all = static_cast<std::uint64_t>(options.steps);
  const std::size_t steps = all > first ? all - first : 0;
  const Clock::time_point begin = Clock::now();
  const auto since = [](Clock::time_point from) { return std::chrono::duration<double>(Clock::now() - from).count(); };
  record->steady_begin = engine.report();
  record->steps.reserve(std::min<std::size_t>(steps, 1 << 16));
  if (const Agreed agreed = agree(ranks, 0, InterruptGuard::seen()); agreed.signal != 0)
    throw Interrupted(agreed.signal);
  const std::size_t steady_from = warm_up_steps(steps), timed_from = steady_from + lead_in_steps(steps - steady_from);
  const bool scheduled = engine.config().learning_rate_schedule.type != "constant" && !options.learning_rate;
  Report timed_begin = record->steady_begin;
  double timed_seconds = 0;
  // A committed step may be gone on from whose checkpoint was never complete.
  if (first > 0 && from_all(ranks, std::filesystem::exists(checkpoint_path(options, first)) ? 1 : 0).front() == 0) {
    save_due(options, engine, first, steps == 0, progress);
  }
  for (std::size_t i = 0; i < steps; ++i) {
    if (i == steady_from) {
      record->steady_begin = report_at_rest(engine);
      record->steady_begin_ns = now_ns();
    }
    if (i == timed_from) timed_begin = engine.report();
    const Clock::time_point step_begin = Clock::now();
    const std::uint64_t begin_ns = now_ns();
    const gpt::StepResult result = trainer.step(first + i, options.learning_rate);
    const Agreed agreed = agree(ranks, result.loss, InterruptGuard::seen());
    const StepRecord step{agreed.mean,          result.grad_norm, since(step_begin),
                          {begin_ns, now_ns()}, i >= timed_from,  result.learning_rate};
    record->steps.push_back(step);
    if (i >= timed_from) timed_seconds += step.seconds;
    std::optional<double> validation_loss;
    if (options.validate_every > 0 && (first + i + 1) % static_cast<std::uint64_t>(options.validate_every) == 0) {
      const Clock::time_point validation_begin = Clock::now();
      validation_loss = validate(options, ranks, trainer, validation->data.get());
      validation->steps.push_back(first + i + 1);
      validation->losses.push_back(*validation_loss);
      if (i >= timed_from) timed_seconds += since(validation_begin);  // its bytes count, too
    }
    log.append(log_line(first + i, step, result.updated, scheduled, validation_loss));
    progress.update(progress_line(first + i + 1, i + 1, steps, step, since(begin), record->tokens_per_step),
                    i + 1 == steps);
    save_due(options, engine, first + i + 1, i + 1 == steps, progress);
    if (agreed.signal != 0 && i + 1 < steps) throw Interrupted(agreed.signal);
  }
  record->timed.add(timed_begin, engine.report(), steps - timed_from, timed_seconds);
  record->end = report_at_rest(engine);
  engine.settle();  // the last step's pending updates, and its checkpoint, may still fail
}

// Before hours of training, not after them. Leaves nothing.
void require_folder(const std::string& folder, bool writable) {
  if (folder.empty()) return;
  std::error_code error;
  std::filesystem::path there = std::filesystem::absolute(folder, error).lexically_normal();
  while (there.has_relative_path() && !std::filesystem::exists(std::filesystem::symlink_status(there, error))) {
    there = there.parent_path();
  }
  if (!std::filesystem::is_directory(there, error)) {
    throw ConfigError("--checkpoint " + folder + ": " + there.string() + " is no folder; name another");
  }
  if (!writable) return;
  const std::filesystem::path trial = there / ("ballast-trial-" + std::to_string(::getpid()));
  if (std::filesystem::create_directory(trial, error)) std::filesystem::remove(trial, error);
  if (!error) return;
  throw ConfigError("--checkpoint " + folder + ": " + there.string() + " cannot be written: " + error.message() +
                    "; name another folder");
}

// Where --checkpoint names a single checkpoint, later ones are put beside it, not into it.
std::string folder_of_saves(const std::string& given) {
  if (given.empty() || !checkpoint_step(given)) return given;
  const std::filesystem::path path = std::filesystem::path(given + "/").lexically_normal().parent_path();
  return path.has_parent_path() ? path.parent_path().string() : ".";
}

// Those of later steps beside a single checkpoint are of another course than the one that begins there: what is saved
// from here on would mix with them, and the next --resume take theirs for this one's.
void require_none_later(const std::string& given) {
  const std::optional<std::uint64_t> step = checkpoint_step(given);
  if (!step) return;
  const std::string folder = folder_of_saves(given);
  std::vector<std::string> later;
  for (const auto& [number, path] : checkpoints_in(folder)) {
    if (checkpoint_step(path).value_or(0) > *step) later.push_back(std::filesystem::path(path).filename().string());
  }
  if (later.empty()) return;
  std::sort(later.begin(), later.end());
  throw ConfigError("--checkpoint " + given + ": beside it lies " + later.front() +
                    (later.size() > 1 ? " and " + std::to_string(later.size() - 1) + " more" : "") +
                    ", of a later step, which the next --resume would take for this run's; move what is later away, or "
                    "copy this one into a folder of its own");
}

// Each is a file, or several with commas between.
std::vector<std::string> files_of(const std::vector<std::string>& given) {
  std::vector<std::string> files;
  for (const std::string& each : given) {
    std::error_code error;
    if (std::filesystem::exists(each, error)) {
      files.push_back(each);
      continue;
    }
    for (std::size_t begin = 0; begin <= each.size();) {
      const std::size_t end = std::min(each.find(',', begin), each.size());
      files.push_back(each.substr(begin, end - begin));
      begin = end + 1;
    }
  }
  return files;
}

std::optional<gpt::TokenType> token_type(const std::string& name) {
  for (const gpt::TokenType type : {gpt::TokenType::u8, gpt::TokenType::u16, gpt::TokenType::u32})
    if (to_string(type) == name) return type;
  return {};
}

int train(Options options, const Config& config, const std::shared_ptr<Communicator>& ranks) {
  const gpt::GptShape shape = gpt::GptShape::from_file(options.model);
  const gpt::TrainSettings settings = settings_of(options, config, *ranks);
  settings.validate(shape);
  const std::vector<std::string> paths = files_of(options.data);
  const std::optional<gpt::TokenType> type = token_type(options.tokens);
  const auto data = gpt::TokenData::open(paths, type, {.held_out = options.validation_split});
  Validation validation;
  validation.unit = data->type() == gpt::TokenType::u8 ? "byte" : "token";
  if (!options.validation_data.empty()) {
    validation.data = gpt::TokenData::open(files_of(options.validation_data), data->type(), {});
  } else if (options.validation_split > 0) {
    validation.data = gpt::TokenData::open(paths, type, {.held_out = options.validation_split, .of_held_out = true});
  } else if (options.validate_every > 0) {
    std::printf(
        "note: validation draws from the training data; --validation-split 0.1 keeps the last tenth out of training, "
        "--validation-data FILE names other data\n");
  }
  for (const gpt::TokenData* each : {data.get(), validation.data.get()}) {
    if (each == nullptr) continue;
    each->require_sequence(settings.sequence);
    each->require_below(shape.vocabulary);
  }
  NamedPaths others = {{"--model", options.model}, {"--engine", options.engine.path()}};
  for (const std::string& path : paths) others.emplace_back("--data", path);
  for (const std::string& path : files_of(options.validation_data)) others.emplace_back("--validation-data", path);
  for (const std::string& path : config.nvme.paths) others.emplace_back("nvme.paths", path);
  require_distinct(
      {{"--json", options.json}, {"--trace", options.trace}, {"--report", options.report}, {"--log", options.log}},
      others);
  for (std::string* file : {&options.json, &options.log, &options.trace, &options.report})
    *file = on_first_rank(*ranks, *file);
  require_folder(options.checkpoint, !options.resume);
  if (options.resume && ranks->rank() == 0) require_none_later(options.checkpoint);
  OutputFile json_file(options.json);
  OutputFile trace_file(options.trace);
  OutputFile report_file(options.report);
  LineLog log(options.log);
  Progress progress;
  std::mutex mutex;
  EngineEnvironment environment;
  environment.communicator = ranks;
  environment.check_interrupt = &InterruptGuard::check;
  environment.log = [&](LogLevel level, std::string_view text) {
    if (level == LogLevel::debug) return;
    const std::lock_guard lock(mutex);
    progress.finish();
    std::fprintf(level == LogLevel::info ? stdout : stderr, "%s%.*s\n",
                 level == LogLevel::info ? "note: " : "ballast: warning: ", static_cast<int>(text.size()), text.data());
  };
  Engine engine(config, environment);
  gpt::GptTrainer trainer(engine, shape, settings, data);
  CommitOptions existing = {ExistingRun::refuse, options.checkpoint};
  if (options.resume) existing.existing = ExistingRun::resume;
  if (options.overwrite) existing.existing = ExistingRun::overwrite;
  engine.commit(existing);
  RunRecord record;
  if ((record.resumed_from = engine.resumed())) {
    std::string differs;
    record.first_step = trainer.next_step(record.resumed_from->user_bytes, options.learning_rate, &differs);
    std::printf("resumed from %s: going on at step %llu\n", record.resumed_from->path.c_str(),
                static_cast<unsigned long long>(record.first_step));
    if (!differs.empty()) environment.log(LogLevel::warning, "the run goes on otherwise than it went: " + differs);
  } else {
    if (options.resume) std::printf("nothing to resume from: starting at step 0\n");
    engine.initialize([fill = trainer.fill()](ParameterId parameter, std::int64_t first, std::span<float> values) {
      InterruptGuard::check();
      fill(parameter, first, values);
    });
  }
  options.checkpoint = folder_of_saves(options.checkpoint);
  require_folder(options.checkpoint, true);  // one that is gone on from may be protected
  record.tokens_per_step = trainer.tokens_per_step();
  const Report plan = engine.report();
  print_opening(options, plan, *data, trainer);
  if (plan.nvme_stored_bytes > 0) record.rates = rates_of(config, plan.io_backend, *ranks);

  try {
    run_steps(options, *ranks, engine, trainer, log, progress, &record, &validation);
  } catch (const Interrupted& interrupted) {
    progress.finish();
    try {
      if (engine.committed_step()) engine.settle();  // nothing that was done is lost
    } catch (const IoError& error) {
      std::fprintf(stderr, "ballast: warning: %s\n", error.what());
    }
    throw Interrupted(interrupted.signal(), " after step " + std::to_string(record.first_step + record.steps.size()));
  }
  gather_seconds(*ranks, record);
  print_closing(record, validation);
  RunReport run{.title = "ballast train, " + std::filesystem::path(options.model).filename().string()};
  explain(engine, record, &run);
  print_limit(run);
  if (trace_file.wanted()) {
    engine.write_trace(trace_file.temporary_path());
    trace_file.publish();
  }
  if (json_file.wanted() || report_file.wanted()) {
    nlohmann::ordered_json& out = run.figures;
    out = to_json(record);
    out["limit"] = to_json(run.limit);
    out["model"] = options.model;
    out["data"] = data->path();
    out["tokens"] = to_string(data->type());
    out["batch"] = settings.batch;
    out["sequence"] = settings.sequence;
    out["micro_batches"] = settings.micro_batches;
    out["order"] = options.order;
    out["seed"] = settings.seed;
    for (const StepRecord& step : record.steps) out["learning_rates"].push_back(step.learning_rate);
    if (record.steps.empty()) out["learning_rates"] = nlohmann::ordered_json::array();
    out["validation_steps"] = validation.steps;
    out["validation_losses"] = nlohmann::ordered_json::array();
    for (const double loss : validation.losses) out["validation_losses"].push_back(finite_or_null(loss));
    out["configuration"] = nlohmann::ordered_json::parse(config.to_json());
    publish(run, json_file, report_file);
  }
  return 0;
}

int run(const Options& options) {
  check(options);
  Config config = options.engine.load();
  if (config.device == "cuda") {
    throw ConfigError(
        "device \"cuda\": the reference trainer computes on the CPU; set device to \"host\" (`bench step` runs on a "
        "GPU, and so does a trainer of your own)");
  }
  config.device = "host";  // what "auto" means for this trainer
  if (config.learning_rate_schedule.needs_total()) {
    config.learning_rate_schedule.total_num_steps = static_cast<std::uint64_t>(options.steps);
    config.validate();
  }
  return run_on_ranks(config,
                      [&](const std::shared_ptr<Communicator>& ranks) { return train(options, config, ranks); });
}

}  // namespace

Command add_train(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* parser = app.add_subcommand("train", "Train a GPT on the bytes of a file");
  parser->add_option("--model", options->model, "Shape of the model, JSON")->type_name("FILE")->required();
  options->engine.add_to(*parser, true);
  parser->add_option("--data", options->data, "The text, whose bytes are the tokens; may repeat, or be a,b,c")
      ->type_name("FILE")
      ->allow_extra_args(false)
      ->required();
  parser
      ->add_option("--tokens", options->tokens,
                   "u8: bytes; u16 or u32: ids, as nanoGPT and llm.c write them (u8, or as llm.c's header says)")
      ->check(CLI::IsMember({"u8", "u16", "u32"}));
  const auto positive = CLI::Range(std::int64_t{1}, std::int64_t{1} << 40).description("");  // told when it is broken
  parser->add_option("--steps", options->steps, "Optimizer steps")
      ->type_name("N")
      ->check(positive)
      ->capture_default_str();
  parser
      ->add_option("--batch", options->batch,
                   "Sequences per step, over all ranks and micro-batches (4 x ranks x micro-batches)")
      ->type_name("B")
      ->check(positive);
  parser->add_option("--sequence", options->sequence, "Tokens per sequence")
      ->type_name("T")
      ->check(positive)
      ->capture_default_str();
  parser->add_option("--micro-batches", options->micro_batches, "Parts that a step's batch is computed in (1)")
      ->type_name("K")
      ->check(positive);
  parser->add_option("--order", options->order, "horizontal: one micro-batch after another; vertical: layer by layer")
      ->check(CLI::IsMember({"horizontal", "vertical"}))
      ->capture_default_str();
  parser->add_option("--learning-rate", options->learning_rate, "Constant, instead of the configuration's")
      ->type_name("LR");
  parser->add_option("--seed", options->seed, "Of the initial parameters and of the batches")
      ->type_name("S")
      ->check(whole_number())
      ->capture_default_str();
  parser
      ->add_option("--checkpoint", options->checkpoint,
                   "Folder for checkpoints: DIR/step-N, at the end and every --every steps; the newest 3 stay")
      ->type_name("DIR")
      ->check([](const std::string& given) { return given.empty() ? "the folder has no name" : ""; }, "");
  parser->add_option("--every", options->every, "Steps between checkpoints")->type_name("N")->check(positive);
  parser->add_flag("--resume", options->resume,
                   "Go on from the newest committed step under nvme.paths or checkpoint; from step 0 where there is "
                   "none");
  parser->add_flag("--overwrite", options->overwrite,
                   "Remove a committed run under nvme.paths, and the checkpoints in --checkpoint");
  parser->add_option("--validate-every", options->validate_every, "Steps between losses on validation data")
      ->type_name("N")
      ->check(positive);
  parser->add_option("--validation-data", options->validation_data, "What to validate on, of the kind of --data")
      ->type_name("FILE")
      ->allow_extra_args(false);
  parser
      ->add_option("--validation-split", options->validation_split,
                   "The part at the end of each file that is kept out of training, to validate on (0)")
      ->type_name("PART")
      ->check(CLI::Range(0.0, 0.99).description(""));
  parser->add_option("--validation-batches", options->validation_batches, "Batches of each validation, always the same")
      ->type_name("N")
      ->check(positive)
      ->capture_default_str();
  parser->add_option("--json", options->json, "Write all figures to FILE")->type_name("FILE");
  parser->add_option("--log", options->log, "Append one JSON line per step to FILE")->type_name("FILE");
  parser->add_option("--trace", options->trace, "Write a timeline for Perfetto to FILE")->type_name("FILE");
  parser->add_option("--report", options->report, "Write where the time went to FILE, a page for any browser")
      ->type_name("FILE");
  return {parser, [options] { return run(*options); }};
}

}  // namespace ballast::cli
