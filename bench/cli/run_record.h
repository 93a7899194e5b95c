// What a training run did, step by step, and the figures drawn from it: steady-state bytes, the bound, efficiency.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/engine.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace ballast::cli {

// Raw rates of the NVMe paths, measured by this process shortly before training.
struct StorageRates {
  double read_bytes_per_second = 0;
  double write_bytes_per_second = 0;
  double mixed_bytes_per_second = 0;  // sum of both directions
  bool direct = true;
};

// What the measurement has under way at once on each path: what was asked for, or less of it, because its buffers are
// in no budget.
struct RateRequests {
  std::uint64_t block_bytes = 0;
  std::uint32_t queue_depth = 0;
};
constexpr std::uint64_t kRateMemoryBytes = std::uint64_t{128} << 20;
RateRequests rate_requests(std::size_t paths, RateRequests asked);

constexpr int kRatePasses = 3;
// Measures them in about a second, over at most half a gigabyte per path. `together` is called before each of
// the kRatePasses passes: ranks that share a drive measure it at the same time. Throws IoError.
StorageRates measure_storage_rates(const std::vector<std::string>& paths, std::uint64_t block_bytes,
                                   std::uint32_t queue_depth, const std::string& backend, int ranks,
                                   const std::function<void()>& together);

struct StepRecord {
  double loss = 0;
  double grad_norm = 0;
  double seconds = 0;
  TimeWindow window;   // steady_clock
  bool timed = false;  // among those that figures of speed are taken from
  double learning_rate = 0;
};

// The steps from which steady-state figures are taken: without the first two, where there are more.
constexpr std::size_t warm_up_steps(std::size_t steps) { return steps == 0 ? 0 : steps < 3 ? steps - 1 : 2; }

// After a rest the slots hold what was read ahead, and the first steps run on it: with gpt-303m and 8 GiB of host
// memory 0.25 s, 1.6 s, and only then the 1.9 s of a step that waits for its drive. Of so many steps after a rest,
// those that are not timed; a run of a few is timed whole.
constexpr std::size_t lead_in_steps(std::size_t steps) { return steps < 5 ? 0 : 2; }

// Steps in a row that the clock was on, and what the lanes did meanwhile.
struct TimedSteps {
  std::size_t steps = 0;
  double seconds = 0;
  decltype(Report::lanes) lanes{};
  void add(const Report& begin, const Report& end, std::size_t count, double count_seconds);
};

struct RunRecord {
  std::uint64_t first_step = 0;
  std::optional<ResumedStep> resumed_from;
  std::uint64_t tokens_per_step = 0;
  std::vector<StepRecord> steps;
  std::uint64_t steady_begin_ns = 0;  // when the next was taken; steady_clock
  Report steady_begin;                // after the warm-up, at rest
  Report end;                         // after the last step, at rest as steady_begin: whole steps' bytes lie between
  TimedSteps timed;                   // of the steps after the warm-up, those without a rest shortly before
  std::optional<StorageRates> rates;  // where NVMe is used
  // Of every rank: its mean seconds per step, and those in which its drive had work. Empty: this rank alone is known.
  std::vector<double> rank_step_seconds, rank_nvme_seconds;

  std::size_t steady_steps() const { return steps.size() - warm_up_steps(steps.size()); }
  double steady_step_seconds() const;  // mean of those timed
  double tokens_per_second() const;
  double bytes_per_step(Lane lane) const;
  // Seconds a step would take if only this lane were slow, of the work in the timed steps. NVMe: bytes over
  // measured rate, reads and writes in turn, or both at once where the device proved faster so; other lanes: the time
  // they had work.
  double bound_seconds(Lane lane) const;
  double nvme_bound_seconds() const;
  std::string bounding_lane() const;
  double efficiency() const;                                // NaN where it cannot be told
  std::vector<TimeWindow> windows(bool timed_alone) const;  // of the steps
};

std::uint64_t now_ns();  // of steady_clock

// "12.0 to 12.3 ms"
std::string seconds_range(const std::vector<double>& seconds);

// The report once what runs ahead of the next step (reads, write-backs, updates) has come to rest. Between two such
// reports lie whole steps' bytes, however few the steps. Waits some 20 ms beyond that, 30 seconds at most; not at all
// where nothing is on NVMe.
Report report_at_rest(const Engine& engine);

// The largest resident set of this process so far.
std::uint64_t peak_resident_bytes();

// A number, or null where it is not finite.
nlohmann::ordered_json finite_or_null(double value);

// The keys that `train` and `bench step` share.
nlohmann::ordered_json to_json(const RunRecord& record);

}  // namespace ballast::cli
