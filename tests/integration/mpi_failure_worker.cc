// One rank of a world in which something goes wrong, for mpi_failure_test: `mpi_failure_worker SCENARIO`. Prints one
// line on what became of it: "rank R: TEXT (S s)". It lets the library initialise MPI, as the command does.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/communicators/mpi.h>
#include <ballast/offload/device.h>
#include <mpi.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace ballast;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kTimeout{4000};
constexpr std::size_t kPartBytes = std::size_t{8} << 20;

void say(int rank, const std::string& text, double seconds) {
  std::printf("rank %d: %s (%.1f s)\n", rank, text.c_str(), seconds);
  std::fflush(stdout);
}

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

double processor_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

// Large calls without end on a duplicate; returns with the failure. after_first is called once they flow.
template <class AfterFirst>
std::string exchange_until_failure(Communicator& world, const AfterFirst& after_first) {
  const auto device = offload::make_host_device();
  const auto stream = device->make_stream("collective");
  std::vector<std::byte> data(kPartBytes * static_cast<std::size_t>(world.world_size()));
  try {
    const auto duplicate = world.duplicate();
    for (int round = 0;; ++round) {
      if (round == 1) after_first();
      duplicate->all_gather(data.data(), kPartBytes, *stream);
      duplicate->reduce_scatter_sum(data.data(), data.data(), kPartBytes / 4, DataType::fp32, *stream);
      stream->synchronize();
      duplicate->check();
    }
  } catch (const CommunicationError& error) {
    return error.what();
  }
}

int run(const std::string& scenario) {
  const auto begin = Clock::now();
  if (scenario == "not-initialised") {
    try {
      make_mpi_communicator({});
    } catch (const UsageError& error) {
      say(0, error.what(), seconds_since(begin));
      return 0;
    }
    return 1;
  }
  if (scenario == "single-threaded") {
    MPI_Init(nullptr, nullptr);
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    int result = 1;
    try {
      make_mpi_communicator({});
    } catch (const UsageError& error) {
      say(rank, error.what(), seconds_since(begin));
      result = 0;
    }
    MPI_Finalize();
    return result;
  }
  if (scenario == "stopped-before-start" || scenario == "stopped-before-duplicate") {
    const int rank = std::atoi(std::getenv("OMPI_COMM_WORLD_RANK"));
    if (rank + 1 == std::atoi(std::getenv("OMPI_COMM_WORLD_SIZE"))) {
      int provided = 0;
      if (scenario == "stopped-before-duplicate") MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
      raise(SIGSTOP);
    }
    try {
      make_mpi_communicator({nullptr, true, {kTimeout}});
    } catch (const CommunicationError& error) {
      say(rank, error.what(), seconds_since(begin));
    }
    return 1;  // stays for a moment at its exit, as the command does
  }
  auto world = make_mpi_communicator({nullptr, true, {kTimeout}});
  const int rank = world->rank();
  const int last = world->world_size() - 1;
  world->barrier();
  if (scenario == "whole") {
    world.reset();
    int finalized = 0;
    MPI_Finalized(&finalized);
    say(rank, finalized != 0 ? "finalised" : "not finalised", seconds_since(begin));
    return 0;
  }
  if (scenario == "late") {
    // Waiting costs little.
    if (rank == last) std::this_thread::sleep_for(kTimeout / 2);
    const double before = processor_seconds();
    const auto waiting = Clock::now();
    world->barrier();
    char text[80];
    std::snprintf(text, sizeof text, "used %.3f of a core", (processor_seconds() - before) / seconds_since(waiting));
    say(rank, text, seconds_since(waiting));
    return 0;
  }
  std::string text;
  if (scenario == "stopped" || scenario == "killed" || scenario == "cut") {
    // Between transfers (stopped), or in their midst.
    std::thread blow;
    text = exchange_until_failure(*world, [&] {
      if (rank != last) return;
      if (scenario == "stopped") raise(SIGSTOP);
      blow = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        kill(getpid(), scenario == "killed" ? SIGKILL : SIGSTOP);
      });
    });
    if (blow.joinable()) blow.join();
  } else if (scenario == "stuck") {
    if (rank == last) std::this_thread::sleep_for(std::chrono::hours(1));
    try {
      for (;;) world->barrier();
    } catch (const CommunicationError& error) {
      text = error.what();
    }
  } else if (scenario == "elsewhere") {
    // The last rank hangs; the middle one waits for it elsewhere, from a little later on than the first for both.
    const auto everybody = world->duplicate();
    const auto pair = world->split(rank == 0 ? 0 : 1);
    if (rank == last) std::this_thread::sleep_for(std::chrono::hours(1));
    if (rank == 1) std::this_thread::sleep_for(kTimeout / 4);
    try {
      (rank == 0 ? everybody : pair)->barrier();
    } catch (const CommunicationError& error) {
      text = error.what();
    }
  } else if (scenario == "gives-up") {
    text = exchange_until_failure(*world, [&] {
      if (rank == last) world->abort("out of luck");
    });
  } else {
    std::fprintf(stderr, "no scenario %s\n", scenario.c_str());
    return 2;
  }
  world.reset();
  say(rank, text, seconds_since(begin));
  // mpirun ends all ranks when the first one exits with an error: not before they have spoken.
  std::this_thread::sleep_for(std::chrono::seconds(1));
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? argv[1] : "");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "unexpected: %s\n", error.what());
    return 3;
  }
}
