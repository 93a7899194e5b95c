// Copies between host and device, each way and both at once, against a plain copy in memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace ballast::cli {

struct CopyBenchResult {  // bytes per second
  double to_device = 0, to_host = 0;
  double both = 0;       // both directions at once, in sum
  double unpinned = 0;   // to the device, from memory that is not registered
  double in_memory = 0;  // from host memory to host memory
};

// Medians of `iterations` copies of `bytes`. `device` is "host" or one of the registered kinds. Throws PlanError where
// the memory is not there, and what the device throws.
CopyBenchResult run_copy_bench(const std::string& device, std::uint64_t bytes, int iterations);

}  // namespace ballast::cli
