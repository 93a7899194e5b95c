// Communicators over NCCL: ranks on GPUs. Large calls are NCCL's collectives on the caller's stream (a CUDA stream);
// NCCL adds in an order of its own, which is the same in every run of one world.
//
// With a control communicator (MPI, or threads of one process) the small calls go over that one: sums in rank order,
// without a GPU, with its errors, and a failure of either ends both at every rank. Without one they are gathers of NCCL
// over a small buffer of device memory, checked in the same way for ranks that make different calls.
//
// NCCL reports little by itself, so a watchdog thread looks at what is under way: an error of NCCL, an error of the
// control communicator, or a call that has begun on its stream and does not end within the timeout is latched, NCCL's
// communicator is aborted, and so is whatever was made from it. Where there is a control communicator the watchdog asks
// over it who has not come; else the text names this rank's call, and other ranks name theirs.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/communicators/bootstrap.h>
#include <ballast/communicators/options.h>
#include <ballast/engine/communicator.h>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace ballast {

struct NcclOptions {
  CommunicatorOptions communicator;
  std::shared_ptr<Communicator> control;  // the same ranks in the same order, used for nothing else; or null
  int device = -1;                        // -1: the caller's current CUDA device
};

// Of the library that is linked: 22809 is 2.28.9; 0 where it does not tell.
int nccl_version();

// What one rank makes and hands to all (an ncclUniqueId).
std::vector<std::byte> make_nccl_id();

// Collective over world_size ranks. Throws CommunicationError where not all come within the timeout, UsageError where
// the control communicator is of another world.
std::shared_ptr<Communicator> make_nccl_communicator(const NcclOptions& options, int rank, int world_size,
                                                     std::span<const std::byte> id);
// Over an ncclComm_t of the trainer's, which stays the trainer's: it outlives the result, and is aborted when that
// fails. Collective.
std::shared_ptr<Communicator> adopt_nccl_communicator(void* nccl_comm, const NcclOptions& options);

// For CommunicatorFactories::nccl: the device by local rank; the id over `bootstrap`, which becomes the control
// communicator, or else by TCP from rank 0 on the port after the launcher's.
std::shared_ptr<Communicator> make_nccl_communicator(const CommunicatorOptions& options, const LaunchInfo& launch,
                                                     const std::shared_ptr<Communicator>& bootstrap);

}  // namespace ballast
