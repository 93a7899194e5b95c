// Exchange: the messages of one call, started, tested and, where the call fails, cancelled. Blocks with a deadline for
// each peer.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "call.h"
#include "mpi_world.h"

namespace ballast::communicators {

// What each rank tells each other before anything else of a call moves; small data rides along.
struct Greeting {
  static constexpr std::size_t kInlineBytes = 256;
  Signature signature;
  std::int32_t color = 0;
  std::uint32_t next_context = 0;
  alignas(8) std::byte data[kInlineBytes] = {};
};
constexpr std::size_t kGreetingHeadBytes = sizeof(Greeting) - Greeting::kInlineBytes;

// Requests come in two sets, so that one piece moves while the one before is worked on.
constexpr int kRequestSets = 2;

// The memory of one call, kept for the next.
struct Workspace {
  explicit Workspace(int ranks);
  Greeting mine;
  std::vector<Greeting> theirs;  // by rank
  struct Set {
    std::vector<MPI_Request> requests;
    std::vector<int> peers;      // of each request
    std::vector<char> receives;  // whether each receives
    int count = 0;
  };
  Set sets[kRequestSets];
  std::vector<int> indices;
  std::vector<MPI_Status> statuses;
  std::vector<std::chrono::steady_clock::time_point> progress;  // by rank: when it last moved
  std::unique_ptr<std::byte[]> pieces;  // kRequestSets * ranks * piece_bytes; made by the first sum
  std::vector<const std::byte*> sources;
};

class WorkspacePool {
 public:
  std::unique_ptr<Workspace> take(int ranks);
  void give_back(std::unique_ptr<Workspace> workspace);

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Workspace>> free_;
};

// Called while waiting; throws to end the wait.
class WaitWatch {
 public:
  virtual void look() = 0;
  virtual void long_wait() = 0;  // half the timeout has gone by without a move; once until the next
  virtual void overdue_ranks(const std::vector<int>& ranks) = 0;  // throws

 protected:
  ~WaitWatch() = default;
};

class Exchange {
 public:
  Exchange(MpiWorld& world, WorkspacePool& pool, const Members& members, std::chrono::nanoseconds timeout,
           WaitWatch& watch);
  ~Exchange();  // cancels what a failed call has left; what cannot be cancelled stays, and its memory with it
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  Workspace& workspace() { return *workspace_; }
  void send(int set, int rank, const void* data, std::size_t bytes, int tag);
  void receive(int set, int rank, void* data, std::size_t bytes, int tag);
  void wait(int set);

 private:
  void add(int set, int rank, bool receives, MPI_Request request);
  bool settle(std::chrono::steady_clock::time_point deadline) noexcept;

  MpiWorld& world_;
  WorkspacePool& pool_;
  const Members& members_;
  const std::chrono::nanoseconds timeout_;
  WaitWatch& watch_;
  std::unique_ptr<Workspace> workspace_;
};

}  // namespace ballast::communicators
