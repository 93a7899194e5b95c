// CudaDevice: the seam of offload/device.h on a CUDA device. One slab of device memory; streams of its own, or the
// trainer's adopted; copies to and from host memory that is pinned once; the optimizer's kernels.
//
// How work of the host fits into a stream. A call holds its stream by a wait on a word of pinned memory, and runs on a
// host thread of that stream once everything before it is done; then the word is written. CUDA's own host functions
// are not used: those of independent streams may be run one after the other, so one that waits (as that of a lease
// that is not ready does) could wait for one behind it; they may not call CUDA; and after a failure they are never
// called, so that whoever waits for them waits for ever. The wait needs stream memory operations of the driver, which
// are always there on Linux since CUDA 12. CUDA does not know what a held stream waits for: streams that share one of
// the device's hardware queues (CUDA_DEVICE_MAX_CONNECTIONS of them, 8 where it is not set) are held with it. Copy
// streams have the highest priority, which keeps their queues apart from compute streams.
//
// Failure. What the device refuses or fails at is latched, with the native name of the error and the place: streams go
// on without it (their results are then anything), so that nothing hangs; synchronize() and every later call that can
// fail throw it as IoError, and the failure handler is told once. The process can use the device no more if the error
// was of the kind that CUDA calls sticky; the text says so.
//
// Sizes in bytes; any thread; the device outlives its streams and events.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/offload/device.h>

#include <cstdint>
#include <memory>
#include <string>

namespace ballast::cuda {

struct CudaDeviceOptions {
  int device = -1;  // -1: the local rank modulo the devices that CUDA shows
  // -1: as LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_RANK, SLURM_LOCALID or MPI_LOCALRANKID says; else 0.
  int local_rank = -1;
  std::uint64_t pin_piece_bytes = std::uint64_t{1} << 30;  // host memory is pinned in pieces of this size
  std::string sysfs_root = "/sys";                         // where the NUMA node of a PCI device is looked up
};

// Throws ConfigError where there is no such device, no driver, or one that is too old.
std::unique_ptr<offload::Device> make_cuda_device(const CudaDeviceOptions& options = {});

// 0 where there is no device or no driver; then *reason (optional) says why.
int device_count(std::string* reason = nullptr);

// Makes "device": "cuda" (and "auto") of a configuration find it. Any number of times.
void register_device();

}  // namespace ballast::cuda
