// Report: what an engine decided and did. Counters grow from commit on; take two reports and subtract for a span.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace ballast {

enum class LogLevel : std::uint8_t { debug, info, warning, error };

enum class Lane : std::uint8_t { nvme_read, nvme_write, host_to_device, device_to_host, collective, compute, cpu };
constexpr int kLaneCount = 7;

struct LaneReport {
  std::uint64_t bytes = 0;    // moved by tasks that have ended (cpu: bytes of memory that updates touch)
  std::uint64_t busy_ns = 0;  // at least one task running, up to now
  std::uint64_t tasks = 0;
  std::uint32_t running = 0;  // tasks under way now; always 0 for compute
};

struct MemoryRange {
  std::string name;
  std::uint64_t bytes = 0;
};

struct Report {
  std::int64_t parameters = 0;
  int world_size = 1;
  int rank = 0;
  std::string device, timing, placement, io_backend, io_backend_reason;  // effective
  int threads = 1;
  int ranks_on_machine = 1;  // that share its cores and memory, this one included
  int zero_stage = 3;
  double resident_fraction = 0;  // of the states' NVMe traffic that placement saves
  std::uint64_t nvme_stored_bytes = 0;
  std::vector<std::string> nvme_files;  // that hold them
  // Nothing is under way (transfers, copies, updates), and nothing starts before the trainer's next call or the next
  // work of a stream.
  bool at_rest = false;
  std::array<LaneReport, kLaneCount> lanes{};
  std::uint64_t steps_updated = 0;
  std::uint64_t steps_discarded = 0;
  std::uint64_t acquires = 0;
  std::uint64_t acquires_prefetched = 0;  // under way or there before they were asked for
  std::uint64_t trace_repairs = 0;
  std::uint64_t acquire_wait_ns = 0;  // host time blocked in calls
  // Of checkpoints that are saved while training goes on: what they have copied; chunks that were copied from what an
  // update had read, while all others are read once more, beside what the lanes count; chunks of these whose place a
  // later step's write waited for, and which were read first.
  std::uint64_t checkpoint_bytes = 0, checkpoint_chunks_from_updates = 0, checkpoint_chunks_asked_for = 0;
  std::uint64_t budget_device_bytes = 0, budget_host_bytes = 0;
  std::uint64_t peak_device_bytes = 0, peak_host_bytes = 0;
  std::vector<MemoryRange> device_memory, host_memory;  // the static maps, by name
};

}  // namespace ballast
