// The speed of the optimizer update in memory, beside what the memory can do and beside the usual three passes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/config.h>

#include <cstdint>
#include <string>

namespace ballast::cli {

// Bytes are those that the loops read and write: 26 a parameter for the update with fp32 moments, 14.06 with 8-bit
// ones.
struct AdamBenchResult {
  double parameters_per_second = 0.0;             // one pass over the split state, bf16 gradients
  double bytes_per_second = 0.0;                  // of the same pass
  double rewrite_bytes_per_second = 0.0;          // the same arrays, read and written back in place
  double three_pass_parameters_per_second = 0.0;  // unscale to fp32, fp32 Adam, cast to bf16
  int threads = 0;
  std::string instruction_set;
};

// Alternates the three in rounds over arrays of `parameters` elements (24 to 30 bytes of memory each) on `threads`
// threads and takes medians. The figures are the memory's only where the arrays exceed the last-level cache. Throws
// ConfigError where the memory is not there.
AdamBenchResult run_adam_bench(std::uint64_t parameters, int threads, MomentType moments = MomentType::fp32);

}  // namespace ballast::cli
