// A step whose optimizer states stream from and to storage, on the virtual clock: the engine's own scheduler over units
// of equal size, with the bytes and rates of any system. For comparing with published runs, of which little more is
// known; the engine's own runs are predicted by run_plan.h. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ballast::planner {

struct StreamedStep {
  double parameters = 0;
  double compute_seconds = 0;  // forward and backward of the step; a third of it is forward
  double nvme_read_per_parameter = 0, nvme_written_per_parameter = 0;  // bytes
  double read_bytes_per_second = 0, write_bytes_per_second = 0;
  double duplex = 1;       // as in nvme_seconds()
  bool overlapped = true;  // updates run beside backward (eager); otherwise all of them after it
  std::uint32_t units = 32;
};
struct StreamedPrediction {
  double step_seconds = 0;  // of a steady step
  double bound_seconds = 0;
};
// Deterministic. ConfigError for senseless inputs.
StreamedPrediction simulate_streamed_step(const StreamedStep& step);

}  // namespace ballast::planner
