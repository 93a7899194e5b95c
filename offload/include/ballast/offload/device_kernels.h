// DeviceKernels: the optimizer's work on a chunk whose arrays lie in device memory, enqueued on a stream of that
// device. The same formulas as chunk_work.h in the same order, so that the results are the same bits. (On the host
// device that work is chunk_work.h itself, over a CpuPool.) SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/offload/chunk_work.h>
#include <ballast/offload/device.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace ballast::offload {

// Any thread, one at a time per stream. Arrays stay valid until the stream has passed the work; arguments by value and
// spans only during the call. Throws IoError where the device refuses.
class DeviceKernels {
 public:
  virtual ~DeviceKernels() = default;
  virtual void update(Stream& stream, const ChunkArrays& arrays, std::span<const UpdateSegment> segments) = 0;
  // destination = source (first) or destination += source, element-wise in `type`.
  virtual void accumulate(Stream& stream, kernels::ElementType type, std::byte* destination, const std::byte* source,
                          std::uint64_t count, bool first) = 0;
  // ceil(count / kSumBlock) sums to host memory, which stays valid until the stream has passed the work.
  virtual void sum_squares(Stream& stream, kernels::ElementType type, const std::byte* source, std::uint64_t count,
                           double* block_sums) = 0;
};

}  // namespace ballast::offload
