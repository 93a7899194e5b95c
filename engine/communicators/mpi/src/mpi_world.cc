// MPI's beginning and end, the duplicate that all goes over, and tags.
// SPDX-License-Identifier: Apache-2.0
#include "mpi_world.h"

#include <ballast/base/check.h>
#include <ballast/base/error.h>
#include <sched.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "call.h"
#include "mpi_result.h"
#include "mpi_thread.h"

namespace ballast::communicators {

std::string mpi_text(int code) {
  char text[MPI_MAX_ERROR_STRING + 1] = {};
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return "MPI error " + std::to_string(code);
  return std::string(text, static_cast<std::size_t>(length));
}

void Backoff::reset() {
  tries_ = 0;
  since_ = std::chrono::steady_clock::now();
}

void Backoff::pause() {
  if (!sleeps()) {
    ++tries_;
    sched_yield();
    return;
  }
  const auto waited = std::chrono::steady_clock::now() - since_;
  const std::chrono::nanoseconds sleep = waited / 16;
  std::this_thread::sleep_for(
      std::clamp<std::chrono::nanoseconds>(sleep, std::chrono::microseconds(20), std::chrono::milliseconds(1)));
}

namespace {

// Tests until done; false when the deadline passes first.
bool finish_by(MPI_Request& request, std::chrono::steady_clock::time_point deadline, const char* call) {
  Backoff backoff;
  for (;;) {
    int done = 0;
    check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), call);
    if (done != 0) return true;
    if (std::chrono::steady_clock::now() > deadline) return false;
    backoff.pause();
  }
}

// mpirun ends every other rank as soon as the first one exits without MPI_Finalize. Where a rank is missing, the others
// find out a little apart; so each stays for a moment at its exit, and all have said why before they are ended.
class LastMoment {
 public:
  LastMoment() = default;
  ~LastMoment() {
    if (wanted_) std::this_thread::sleep_for(std::chrono::seconds(1));
  }
  LastMoment(const LastMoment&) = delete;
  LastMoment& operator=(const LastMoment&) = delete;
  void want() noexcept { wanted_ = true; }

 private:
  std::atomic<bool> wanted_{false};
};

LastMoment& last_moment() {
  static LastMoment moment;
  return moment;
}

constexpr int kTagPhaseBits = 2;
constexpr std::chrono::nanoseconds kFinalizeAfterFailure = std::chrono::seconds(5);

}  // namespace

// One for all worlds of the process. Finalises MPI only where it initialised it.
class MpiRuntime {
 public:
  static std::shared_ptr<MpiRuntime> open(bool initialize, std::chrono::nanoseconds timeout) {
    static std::mutex mutex;
    static std::weak_ptr<MpiRuntime> current;
    const std::lock_guard lock(mutex);
    if (auto runtime = current.lock()) return runtime;
    int finalized = 0;
    check_mpi(MPI_Finalized(&finalized), "MPI_Finalized");
    if (finalized != 0) {
      throw UsageError(
          "MPI has been finalised, and cannot be initialised again in this process. Keep a communicator "
          "for as long as another may be made");
    }
    int initialized = 0;
    check_mpi(MPI_Initialized(&initialized), "MPI_Initialized");
    auto runtime = std::make_shared<MpiRuntime>();
    if (initialized == 0) {
      if (!initialize) {
        throw UsageError(
            "MPI is not initialised: call MPI_Init_thread with MPI_THREAD_MULTIPLE before a communicator is "
            "made, or set MpiOptions::initialize");
      }
      static bool begun = false;
      if (std::exchange(begun, true)) throw CommunicationError("MPI did not start, and is not started again");
      runtime->thread_ = std::make_unique<MpiThread>();
      const std::optional<int> code = runtime->thread_->initialize(timeout);
      if (!code) {
        last_moment().want();
        throw CommunicationError("MPI did not start within " + format_seconds(timeout) +
                                 ": another rank is dead, stopped or not there yet. Look at their logs; where one is "
                                 "only slow, raise communication.timeout_seconds");
      }
      check_mpi(*code, "MPI_Init_thread");
      runtime->ours_ = true;
      last_moment();  // from here on it has an end
    }
    int level = 0;
    check_mpi(MPI_Query_thread(&level), "MPI_Query_thread");
    if (level != MPI_THREAD_MULTIPLE) {
      const char* const names[] = {"MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED"};
      const int known = level == MPI_THREAD_SINGLE ? 0 : level == MPI_THREAD_FUNNELED ? 1 : 2;
      throw UsageError(std::string("MPI runs with ") + names[known] +
                       ", and communicators need MPI_THREAD_MULTIPLE: collectives run on threads of their own. " +
                       (runtime->ours_ ? "This MPI library does not offer it; install one that does"
                                       : "Ask MPI_Init_thread for it"));
    }
    runtime->timeout_ = timeout;
    current = runtime;
    return runtime;
  }

  ~MpiRuntime() {
    if (!ours_ || broken_) return;
    try {
      // MPI_Finalize waits for all, without end: so see that all are there.
      MPI_Request request = MPI_REQUEST_NULL;
      check_mpi(MPI_Ibarrier(MPI_COMM_WORLD, &request), "MPI_Ibarrier");
      const auto wait = failed_ ? std::min(timeout_, kFinalizeAfterFailure) : timeout_;
      if (!finish_by(request, std::chrono::steady_clock::now() + wait, "MPI_Test")) return;
      // It waits for all once more. What it says can be told to nobody any more.
      static_cast<void>(thread_->finalize(wait));
    } catch (const std::exception&) {
      // The process ends without; mpirun says so.
    }
  }
  MpiRuntime() = default;
  MpiRuntime(const MpiRuntime&) = delete;
  MpiRuntime& operator=(const MpiRuntime&) = delete;

  bool ours() const { return ours_; }
  void set_failed() noexcept { failed_ = true; }
  void set_broken() noexcept {
    broken_ = true;
    if (ours_) last_moment().want();
  }

 private:
  bool ours_ = false;
  std::unique_ptr<MpiThread> thread_;  // where MPI is ours
  std::chrono::nanoseconds timeout_{};
  std::atomic<bool> failed_{false};
  std::atomic<bool> broken_{false};
};

namespace {

constexpr int kWaitsForDuplicateTag = 1;
constexpr std::chrono::milliseconds kSignsArrive{200};

Members everybody(int size, int rank) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return Members(std::move(ranks), rank);
}

void say_waiting(MPI_Comm comm, int size, int rank) {
  static const char sign = 1;  // outlives every request
  for (int r = 0; r < size; ++r) {
    if (r == rank) continue;
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi(MPI_Isend(&sign, 1, MPI_CHAR, r, kWaitsForDuplicateTag, comm, &request), "MPI_Isend");
    check_mpi(MPI_Request_free(&request), "MPI_Request_free");
  }
}

// The ranks that have not said that they wait, too.
std::vector<int> silent_ranks(MPI_Comm comm, int size, int rank) {
  std::vector<bool> heard(static_cast<std::size_t>(size), false);
  heard[static_cast<std::size_t>(rank)] = true;
  const auto deadline = std::chrono::steady_clock::now() + kSignsArrive;
  Backoff backoff;
  while (std::chrono::steady_clock::now() < deadline) {
    int found = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    check_mpi(MPI_Improbe(MPI_ANY_SOURCE, kWaitsForDuplicateTag, comm, &found, &message, &status), "MPI_Improbe");
    if (found == 0) {
      backoff.pause();
      continue;
    }
    char sign = 0;
    check_mpi(MPI_Mrecv(&sign, 1, MPI_CHAR, &message, &status), "MPI_Mrecv");
    heard[static_cast<std::size_t>(status.MPI_SOURCE)] = true;
  }
  std::vector<int> silent;
  for (int r = 0; r < size; ++r) {
    if (!heard[static_cast<std::size_t>(r)]) silent.push_back(r);
  }
  return silent;
}

}  // namespace

std::shared_ptr<MpiWorld> MpiWorld::open(const MpiOptions& options, std::chrono::nanoseconds timeout) {
  std::shared_ptr<MpiWorld> world(new MpiWorld);
  world->runtime_ = MpiRuntime::open(options.initialize, timeout);
  const MPI_Comm given =
      options.communicator != nullptr ? *static_cast<const MPI_Comm*>(options.communicator) : MPI_COMM_WORLD;
  if (given == MPI_COMM_NULL) throw UsageError("the MPI communicator handed in is MPI_COMM_NULL");
  int between_groups = 0;
  check_mpi(MPI_Comm_test_inter(given, &between_groups), "MPI_Comm_test_inter");
  if (between_groups != 0) throw UsageError("the MPI communicator handed in is an intercommunicator");
  check_mpi(MPI_Comm_rank(given, &world->rank_), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(given, &world->size_), "MPI_Comm_size");

  // The handle is written when the duplicate is done; where it never is, the place must outlive this call.
  auto duplicate = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Comm_idup(given, duplicate.get(), &request), "MPI_Comm_idup");
  const auto begin = std::chrono::steady_clock::now();
  if (!finish_by(request, begin + timeout / 2, "MPI_Test of MPI_Comm_idup")) {
    // On a communicator that is nobody else's, those who wait say so to all; the silent ones are to blame.
    const bool may_speak = options.communicator == nullptr && world->runtime_->ours();
    if (may_speak) say_waiting(given, world->size_, world->rank_);
    if (!finish_by(request, begin + timeout, "MPI_Test of MPI_Comm_idup")) {
      static_cast<void>(duplicate.release());
      world->set_broken();
      const std::vector<int> silent = may_speak ? silent_ranks(given, world->size_, world->rank_) : std::vector<int>();
      const std::string who = silent.empty() ? "not all of the " + std::to_string(world->size_) + " ranks came"
                                             : everybody(world->size_, world->rank_).names(silent) + " did not come";
      throw CommunicationError(who + " to make a communicator within " + format_seconds(timeout) + " (rank " +
                               std::to_string(world->rank_) +
                               " waits). Every rank must make it; where one is only slow, raise "
                               "communication.timeout_seconds");
    }
  }
  world->comm_ = *duplicate;
  check_mpi(MPI_Comm_set_errhandler(world->comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");

  int* bound = nullptr;
  int found = 0;
  check_mpi(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&bound), &found), "MPI_Comm_get_attr");
  const std::int64_t tags = (found != 0 ? std::int64_t{*bound} : std::int64_t{32767}) + 1;
  int bits = 0;
  while ((std::int64_t{2} << bits) <= tags) ++bits;
  world->heard_ns_ = std::vector<std::atomic<std::int64_t>>(static_cast<std::size_t>(world->size_));
  BALLAST_CHECK(bits >= 15);  // the standard's least
  world->context_bits_ = (bits - kTagPhaseBits) * 2 / 5;
  world->sequence_bits_ = bits - kTagPhaseBits - world->context_bits_;
  return world;
}

MpiWorld::~MpiWorld() {
  if (comm_ == MPI_COMM_NULL || unclean_) return;
  int finalized = 0;
  if (MPI_Finalized(&finalized) != MPI_SUCCESS || finalized != 0) return;
  if (MPI_Comm_free(&comm_) != MPI_SUCCESS) runtime_->set_broken();
}

int MpiWorld::tag(std::uint32_t context, std::uint64_t sequence, MessageKind kind) const {
  const std::uint64_t window = sequence & ((std::uint64_t{1} << sequence_bits_) - 1);
  const std::uint64_t place = (std::uint64_t{context} << sequence_bits_) | window;
  return static_cast<int>((place << kTagPhaseBits) | static_cast<std::uint64_t>(kind));
}

void MpiWorld::take_context(std::uint32_t context) {
  if (context >= (std::uint32_t{1} << context_bits_)) {
    throw UsageError("more than " + std::to_string((1 << context_bits_) - 1) +
                     " communicators were made by duplicate and split from one MPI communicator; make another with "
                     "make_mpi_communicator");
  }
  next_context_ = context + 1;
}

namespace {

constexpr std::uint64_t kSignSequence = 1;  // with MessageKind::abort, whose own messages have 0

std::int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

void MpiWorld::tell_waiting() noexcept {
  static const char sign = 1;  // outlives every request
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    MPI_Request request = MPI_REQUEST_NULL;
    const int code = MPI_Isend(&sign, 1, MPI_CHAR, r, tag(0, kSignSequence, MessageKind::abort), comm_, &request);
    // Nobody waits for it: a sign that does not come through is none.
    if (code == MPI_SUCCESS && MPI_Request_free(&request) == MPI_SUCCESS) continue;
    set_failed();
  }
}

void MpiWorld::hear_waiting() {
  for (;;) {
    int found = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    check_mpi(MPI_Improbe(MPI_ANY_SOURCE, tag(0, kSignSequence, MessageKind::abort), comm_, &found, &message, &status),
              "MPI_Improbe");
    if (found == 0) return;
    char sign = 0;
    check_mpi(MPI_Mrecv(&sign, 1, MPI_CHAR, &message, &status), "MPI_Mrecv");
    heard_ns_[static_cast<std::size_t>(status.MPI_SOURCE)] = steady_ns();
  }
}

bool MpiWorld::waits(int rank, std::chrono::nanoseconds within) const {
  const std::int64_t heard = heard_ns_[static_cast<std::size_t>(rank)];
  return heard != 0 && steady_ns() - heard < within.count();
}

void MpiWorld::set_failed() noexcept {
  unclean_ = true;
  runtime_->set_failed();
}

void MpiWorld::set_broken() noexcept {
  unclean_ = true;
  runtime_->set_broken();
}

}  // namespace ballast::communicators
