// What stands behind a communicator over NCCL: NCCL's own, the calls under way, the watchdog.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/communicators/nccl.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "call.h"
#include "ordered.h"

namespace ballast::communicators {

// Waits, by asking, until a communicator of NCCL has done what was begun. ncclInProgress after the timeout.
ncclResult_t settled(ncclComm_t comm, ncclResult_t result, std::chrono::nanoseconds timeout);
std::string nccl_text(const char* call, ncclResult_t result, ncclComm_t comm);

class NcclState {
 public:
  // Takes over comm where owned. The control communicator and its duplicate for the watchdog may be null.
  NcclState(ncclComm_t comm, bool owned, Members members, int device, std::chrono::nanoseconds timeout,
            std::shared_ptr<Communicator> control);
  ~NcclState();
  NcclState(const NcclState&) = delete;
  NcclState& operator=(const NcclState&) = delete;

  // After construction, collective: what small calls and the watchdog need.
  void start();

  const Members& members() const { return members_; }
  Communicator* control() const { return control_.get(); }
  void check();
  void fail(std::string_view text, bool tell_control = true) noexcept;
  void abort(std::string_view reason) noexcept;

  enum class Large { all_gather, reduce_scatter, all_reduce };
  void run_on(cudaStream_t stream, Large kind, const Signature& signature, const std::byte* source,
              std::byte* destination, std::size_t elements, ncclDataType_t type);
  // Small and blocking, over NCCL: everybody's bytes, after a check that all make the same call.
  void gather(Signature signature, std::span<const std::byte> mine, std::span<std::byte> all);
  // Collective: the ranks of one color, as NCCL numbers them (not negative).
  std::shared_ptr<NcclState> split(int color, Members members, std::shared_ptr<Communicator> control);
  std::uint64_t next_sequence() { return sequence_++; }
  // As Communicator's.
  bool register_buffer(std::span<std::byte> buffer, std::string* reason);
  void unregister_buffer(std::span<std::byte> buffer) noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct Pending {
    cudaEvent_t begin = nullptr, end = nullptr;
    Signature signature;
    Clock::time_point since{};  // it was first seen to have begun
    bool begun = false;
  };

  struct Registered {
    const std::byte* data;
    void* handle;  // NCCL's; null where it chose to do nothing
  };

  void launch(cudaStream_t stream, Large kind, const Pending& p, const std::byte* source, std::byte* destination,
              std::size_t elements, ncclDataType_t type);
  void gather_slice(std::span<const std::byte> mine, std::span<std::byte> all);
  void watch();
  std::string who_is_missing(const Signature& signature);
  void require(cudaError_t result, const char* call);
  std::string cuda_text(cudaError_t result, const char* call) const;
  // Waits until the communicator, one of the members below, has done what was begun.
  void require(ncclResult_t result, const char* call, const ncclComm_t& comm);
  ncclResult_t split_off(int color, ncclComm_t& made);
  Pending take_pending();

  const bool owned_;
  const Members members_;
  const int device_;
  const std::chrono::nanoseconds timeout_;
  const std::shared_ptr<Communicator> control_;
  std::shared_ptr<Communicator> watch_control_;
  FailureLatch latch_;

  std::mutex order_mutex_;  // NCCL's calls on one communicator come one after the other
  std::mutex mutex_;
  ncclComm_t comm_;             // null once aborted; guarded by mutex_, as below
  ncclComm_t small_ = nullptr;  // for small calls without a control communicator
  std::deque<Pending> pending_;
  std::vector<Pending> free_;
  std::vector<std::weak_ptr<NcclState>> children_;
  std::vector<Registered> registered_;  // with comm_, and gone with it
  std::condition_variable changed_;
  bool stopping_ = false;

  std::uint64_t sequence_ = 0;  // of calls, by the one thread that makes them at a time
  cudaStream_t small_stream_ = nullptr;
  cudaEvent_t small_done_ = nullptr;
  std::byte* small_buffer_ = nullptr;  // device memory: one slice of every rank
  std::thread watchdog_;
};

}  // namespace ballast::communicators
