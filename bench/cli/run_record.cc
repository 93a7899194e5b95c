// Figures of a run.
// SPDX-License-Identifier: Apache-2.0
#include "run_record.h"

#include <ballast/base/size.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>
#include <thread>

#include "block_order.h"
#include "display.h"
#include "interrupt.h"
#include "storage_bench.h"

namespace ballast::cli {
namespace {

constexpr std::uint64_t kRateBytes = std::uint64_t{512} << 20;      // of all ranks together,
constexpr std::uint64_t kLeastRateBytes = std::uint64_t{64} << 20;  // but of each at least so many
constexpr double kRatePassSeconds = 0.4;

const LaneReport& lane_of(const Report& report, Lane lane) { return report.lanes[static_cast<std::size_t>(lane)]; }

constexpr std::array<std::pair<Lane, const char*>, 5> kOtherLanes = {{{Lane::host_to_device, "host_to_device"},
                                                                      {Lane::device_to_host, "device_to_host"},
                                                                      {Lane::collective, "collective"},
                                                                      {Lane::compute, "compute"},
                                                                      {Lane::cpu, "cpu"}}};

}  // namespace

RateRequests rate_requests(std::size_t paths, RateRequests asked) {
  const std::uint64_t most = kRateMemoryBytes / std::max<std::size_t>(paths, 1);  // of a path
  const auto bytes = [](const RateRequests& of) { return of.block_bytes * BlockOrder::buffers(1, of.queue_depth); };
  while (bytes(asked) > most && asked.queue_depth > 1) asked.queue_depth /= 2;
  const std::uint64_t block = base::round_down(most / BlockOrder::buffers(1, asked.queue_depth), 4 * base::kKiB);
  asked.block_bytes = std::min(asked.block_bytes, std::max(block, 4 * base::kKiB));
  return asked;
}

StorageRates measure_storage_rates(const std::vector<std::string>& paths, std::uint64_t block_bytes,
                                   std::uint32_t queue_depth, const std::string& backend, int ranks,
                                   const std::function<void()>& together) {
  const RateRequests requests = rate_requests(paths.size(), {block_bytes, queue_depth});
  const std::uint64_t wanted = std::max(kRateBytes / static_cast<std::uint64_t>(ranks), kLeastRateBytes);
  StorageBench bench({.paths = paths,
                      .bytes_per_path = std::max(base::round_down(wanted, requests.block_bytes), requests.block_bytes),
                      .block_bytes = requests.block_bytes,
                      .queue_depth = requests.queue_depth,
                      .backend = backend_from(backend),
                      .pass_seconds_max = kRatePassSeconds});
  StorageRates rates;
  bench.prepare();
  using Pattern = StorageBench::Pattern;
  const auto rate = [&](Pattern pattern) {
    together();
    return bench.run(pattern).bytes_per_second();
  };
  rates.write_bytes_per_second = rate(Pattern::write);
  rates.read_bytes_per_second = rate(Pattern::read);
  rates.mixed_bytes_per_second = rate(Pattern::rewrite);
  rates.direct = bench.direct();
  return rates;
}

void TimedSteps::add(const Report& begin, const Report& end, std::size_t count, double count_seconds) {
  steps += count;
  seconds += count_seconds;
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    lanes[i].bytes += end.lanes[i].bytes - begin.lanes[i].bytes;
    lanes[i].busy_ns += end.lanes[i].busy_ns - begin.lanes[i].busy_ns;
  }
}

double RunRecord::steady_step_seconds() const {
  if (timed.steps == 0) return std::numeric_limits<double>::quiet_NaN();
  return timed.seconds / static_cast<double>(timed.steps);
}

double RunRecord::tokens_per_second() const { return static_cast<double>(tokens_per_step) / steady_step_seconds(); }

double RunRecord::bytes_per_step(Lane lane) const {
  return static_cast<double>(lane_of(end, lane).bytes - lane_of(steady_begin, lane).bytes) /
         static_cast<double>(steady_steps());
}

double RunRecord::bound_seconds(Lane lane) const {
  return static_cast<double>(timed.lanes[static_cast<std::size_t>(lane)].busy_ns) * 1e-9 /
         static_cast<double>(timed.steps);
}

double RunRecord::nvme_bound_seconds() const {
  const auto per_step = [&](Lane lane) {
    return static_cast<double>(timed.lanes[static_cast<std::size_t>(lane)].bytes) / static_cast<double>(timed.steps);
  };
  const double read = per_step(Lane::nvme_read);
  const double written = per_step(Lane::nvme_write);
  if (read + written == 0) return 0;
  if (!rates) return std::numeric_limits<double>::quiet_NaN();
  const double in_turn = read / rates->read_bytes_per_second + written / rates->write_bytes_per_second;
  return std::min(in_turn, (read + written) / rates->mixed_bytes_per_second);
}

std::string RunRecord::bounding_lane() const {
  std::string name = "nvme";
  double largest = nvme_bound_seconds();
  for (const auto& [lane, lane_name] : kOtherLanes) {
    if (bound_seconds(lane) <= largest) continue;
    largest = bound_seconds(lane);
    name = lane_name;
  }
  return name;
}

double RunRecord::efficiency() const {
  double largest = nvme_bound_seconds();
  if (std::isnan(largest)) return largest;
  for (const auto& [lane, name] : kOtherLanes) largest = std::max(largest, bound_seconds(lane));
  return largest / steady_step_seconds();
}

std::vector<TimeWindow> RunRecord::windows(bool timed_alone) const {
  std::vector<TimeWindow> result;
  for (const StepRecord& step : steps)
    if (step.timed || !timed_alone) result.push_back(step.window);
  return result;
}

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(
      std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
}

std::string seconds_range(const std::vector<double>& seconds) {
  if (seconds.empty()) return "n/a";
  const auto [low, high] = std::minmax_element(seconds.begin(), seconds.end());
  return fixed_text(*low * 1e3, 1) + " to " + fixed_text(*high * 1e3, 1) + " ms";
}

Report report_at_rest(const Engine& engine) {
  constexpr int kQuietLooks = 4, kLooks = 6000;
  constexpr std::chrono::milliseconds kBetweenLooks{5};
  Report report = engine.report();
  if (report.nvme_stored_bytes == 0) return report;
  const auto tasks = [](const Report& of) {
    std::uint64_t started = 0;
    for (const LaneReport& lane : of.lanes) started += lane.tasks;
    return started;
  };
  for (int quiet = 0, looks = 0; quiet < kQuietLooks && looks < kLooks; ++looks) {
    InterruptGuard::check();
    std::this_thread::sleep_for(kBetweenLooks);
    Report next = engine.report();
    // Four looks, as a stream may still have a step to go that lets more begin.
    quiet = next.at_rest && tasks(next) == tasks(report) ? quiet + 1 : 0;
    report = std::move(next);
  }
  return report;
}

std::uint64_t peak_resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    std::uint64_t kibibytes = 0;
    if (word == "VmHWM:" && status >> kibibytes) return kibibytes * 1024;
  }
  return 0;
}

nlohmann::ordered_json finite_or_null(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr);
}

nlohmann::ordered_json to_json(const RunRecord& record) {
  using Json = nlohmann::ordered_json;
  const Report& report = record.end;
  Json out;
  out["parameters"] = report.parameters;
  out["world_size"] = report.world_size;
  out["first_step"] = record.first_step;
  out["tokens_per_second"] = record.tokens_per_step > 0 ? finite_or_null(record.tokens_per_second()) : Json(nullptr);
  out["efficiency"] = finite_or_null(record.efficiency());
  out["bound_seconds"]["nvme"] = finite_or_null(record.nvme_bound_seconds());
  for (const auto& [lane, name] : kOtherLanes) out["bound_seconds"][name] = finite_or_null(record.bound_seconds(lane));
  // Whole bytes: a mean over steps may have a fraction.
  const auto bytes = [&](Lane lane) { return std::llround(record.bytes_per_step(lane)); };
  out["bytes_per_step"] = {{"nvme_read", bytes(Lane::nvme_read)},
                           {"nvme_written", bytes(Lane::nvme_write)},
                           {"host_to_device", bytes(Lane::host_to_device)},
                           {"device_to_host", bytes(Lane::device_to_host)},
                           {"collective", bytes(Lane::collective)}};
  out["resident_fraction"] = finite_or_null(report.resident_fraction);
  out["peak_bytes"] = {
      {"device", report.peak_device_bytes}, {"host", report.peak_host_bytes}, {"resident_set", peak_resident_bytes()}};
  out["budget_bytes"] = {{"device", report.budget_device_bytes}, {"host", report.budget_host_bytes}};
  out["nvme_stored_bytes"] = report.nvme_stored_bytes;
  out["io_backend"] = report.io_backend.empty() ? Json(nullptr) : Json(report.io_backend);
  out["device"] = report.device;
  out["timing"] = report.timing;
  out["placement"] = report.placement;
  out["threads"] = report.threads;
  out["zero_stage"] = report.zero_stage;
  out["resumed_from"] = nullptr;
  if (record.resumed_from) {
    out["resumed_from"] = {{"path", record.resumed_from->path}, {"step", record.resumed_from->step}};
  }
  out["steps_updated"] = report.steps_updated;
  out["steps_discarded"] = report.steps_discarded;
  out["trace_repairs"] = report.trace_repairs;
  out["acquires"] = report.acquires;
  out["acquires_prefetched"] = report.acquires_prefetched;
  out["measured_rates"] = nullptr;
  if (record.rates)
    out["measured_rates"] = {{"read_bytes_per_second", finite_or_null(record.rates->read_bytes_per_second)},
                             {"write_bytes_per_second", finite_or_null(record.rates->write_bytes_per_second)},
                             {"mixed_bytes_per_second", finite_or_null(record.rates->mixed_bytes_per_second)},
                             {"direct", record.rates->direct}};
  const auto of_ranks = [](const std::vector<double>& values) {
    Json each = Json::array();
    for (const double value : values) each.push_back(finite_or_null(value));
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    return Json{{"min", finite_or_null(*low)}, {"max", finite_or_null(*high)}, {"each", std::move(each)}};
  };
  if (!record.rank_step_seconds.empty()) out["rank_step_seconds"] = of_ranks(record.rank_step_seconds);
  if (!record.rank_nvme_seconds.empty()) out["rank_nvme_seconds"] = of_ranks(record.rank_nvme_seconds);
  Json losses = Json::array(), norms = Json::array(), seconds = Json::array();
  for (const StepRecord& step : record.steps) {
    losses.push_back(finite_or_null(step.loss));
    norms.push_back(finite_or_null(step.grad_norm));
    seconds.push_back(finite_or_null(step.seconds));
  }
  out["losses"] = std::move(losses);
  out["grad_norms"] = std::move(norms);
  out["step_seconds"] = std::move(seconds);
  return out;
}

}  // namespace ballast::cli
