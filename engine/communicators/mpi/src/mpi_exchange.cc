// Messages of one call: started, tested with a deadline for each peer, cancelled where the call fails.
// SPDX-License-Identifier: Apache-2.0
#include "mpi_exchange.h"

#include <ballast/base/check.h>
#include <ballast/base/error.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "mpi_result.h"

namespace ballast::communicators {
namespace {

using Clock = std::chrono::steady_clock;

// How long a failed call waits for cancelled receives and for sends to end.
constexpr std::chrono::milliseconds kSettleTime{200};
constexpr int kTestsPerLook = 32;

}  // namespace

Workspace::Workspace(int ranks)
    : theirs(static_cast<std::size_t>(ranks)),
      indices(2 * static_cast<std::size_t>(ranks)),
      statuses(2 * static_cast<std::size_t>(ranks)),
      progress(static_cast<std::size_t>(ranks)),
      sources(static_cast<std::size_t>(ranks)) {
  for (Set& set : sets) {
    set.requests.resize(2 * static_cast<std::size_t>(ranks), MPI_REQUEST_NULL);
    set.peers.resize(2 * static_cast<std::size_t>(ranks));
    set.receives.resize(2 * static_cast<std::size_t>(ranks));
  }
}

std::unique_ptr<Workspace> WorkspacePool::take(int ranks) {
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      auto workspace = std::move(free_.back());
      free_.pop_back();
      return workspace;
    }
    free_.reserve(free_.capacity() + 1);  // for its way back
  }
  return std::make_unique<Workspace>(ranks);
}

void WorkspacePool::give_back(std::unique_ptr<Workspace> workspace) {
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(workspace));
}

Exchange::Exchange(MpiWorld& world, WorkspacePool& pool, const Members& members, std::chrono::nanoseconds timeout,
                   WaitWatch& watch)
    : world_(world),
      pool_(pool),
      members_(members),
      timeout_(timeout),
      watch_(watch),
      workspace_(pool.take(members.count())) {}

Exchange::~Exchange() {
  for (Workspace::Set& set : workspace_->sets) {
    for (int i = 0; i < set.count; ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (set.receives[at] != 0 && set.requests[at] != MPI_REQUEST_NULL) {
        if (MPI_Cancel(&set.requests[at]) != MPI_SUCCESS) world_.set_failed();
      }
    }
  }
  if (settle(Clock::now() + kSettleTime)) {
    for (Workspace::Set& set : workspace_->sets) set.count = 0;
    pool_.give_back(std::move(workspace_));
    return;
  }
  // MPI may still write to it: it stays for the rest of the process.
  world_.set_broken();
  static_cast<void>(workspace_.release());
}

bool Exchange::settle(Clock::time_point deadline) noexcept {
  Backoff backoff;
  for (;;) {
    int left = 0;
    for (Workspace::Set& set : workspace_->sets) {
      for (int i = 0; i < set.count; ++i) {
        MPI_Request& request = set.requests[static_cast<std::size_t>(i)];
        if (request == MPI_REQUEST_NULL) continue;
        int done = 0;
        if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return false;
        if (done == 0) ++left;
      }
    }
    if (left == 0) return true;
    if (Clock::now() > deadline) return false;
    backoff.pause();
  }
}

void Exchange::add(int set, int rank, bool receives, MPI_Request request) {
  Workspace::Set& own = workspace_->sets[set];
  const auto at = static_cast<std::size_t>(own.count++);
  own.requests[at] = request;
  own.peers[at] = rank;
  own.receives[at] = receives ? 1 : 0;
  workspace_->progress[static_cast<std::size_t>(rank)] = Clock::now();
}

void Exchange::send(int set, int rank, const void* data, std::size_t bytes, int tag) {
  BALLAST_CHECK(bytes <= std::numeric_limits<int>::max());
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, members_.world_rank(rank), tag, world_.comm(), &request),
            "MPI_Isend");
  add(set, rank, false, request);
}

void Exchange::receive(int set, int rank, void* data, std::size_t bytes, int tag) {
  BALLAST_CHECK(bytes <= std::numeric_limits<int>::max());
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, members_.world_rank(rank), tag, world_.comm(), &request),
            "MPI_Irecv");
  add(set, rank, true, request);
}

void Exchange::wait(int which) {
  Workspace::Set& set = workspace_->sets[which];
  Backoff backoff;
  int tests = 0;
  bool told = false;
  while (set.count != 0) {
    int completed = 0;
    const int code = MPI_Testsome(set.count, set.requests.data(), &completed, workspace_->indices.data(),
                                  workspace_->statuses.data());
    if (code == MPI_ERR_IN_STATUS) {
      for (int i = 0; i < completed; ++i) {
        const auto at = static_cast<std::size_t>(i);
        if (workspace_->statuses[at].MPI_ERROR == MPI_SUCCESS) continue;
        const int peer = set.peers[static_cast<std::size_t>(workspace_->indices[at])];
        throw CommunicationError("a transfer with " + members_.name(peer) +
                                 " failed: " + mpi_text(workspace_->statuses[at].MPI_ERROR));
      }
    }
    check_mpi(code, "MPI_Testsome");
    if (completed == MPI_UNDEFINED) break;
    const auto now = Clock::now();
    if (completed != 0) {
      for (int i = 0; i < completed; ++i) {
        const int index = workspace_->indices[static_cast<std::size_t>(i)];
        workspace_->progress[static_cast<std::size_t>(set.peers[static_cast<std::size_t>(index)])] = now;
      }
      backoff.reset();
      told = false;
      continue;
    }
    if (backoff.sleeps() || ++tests % kTestsPerLook == 0) {
      watch_.look();
      Clock::duration longest{0};
      for (int i = 0; i < set.count; ++i) {
        const auto at = static_cast<std::size_t>(i);
        if (set.requests[at] == MPI_REQUEST_NULL) continue;
        longest = std::max(longest, now - workspace_->progress[static_cast<std::size_t>(set.peers[at])]);
      }
      if (longest > timeout_ / 2 && !std::exchange(told, true)) watch_.long_wait();
      if (longest > timeout_) {
        std::vector<int> late;
        for (int i = 0; i < set.count; ++i) {
          const auto at = static_cast<std::size_t>(i);
          const int peer = set.peers[at];
          if (set.requests[at] == MPI_REQUEST_NULL) continue;
          if (now - workspace_->progress[static_cast<std::size_t>(peer)] <= timeout_) continue;
          if (std::find(late.begin(), late.end(), peer) == late.end()) late.push_back(peer);
        }
        std::sort(late.begin(), late.end());
        watch_.overdue_ranks(late);
      }
    }
    backoff.pause();
  }
  set.count = 0;
}

}  // namespace ballast::communicators
