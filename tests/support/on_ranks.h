// Ranks as threads of the test.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/communicators/in_process.h>

#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace ballast::testing {

// Runs `work` on every rank; rethrows the first exception.
template <class Work>
void on_ranks(int world_size, const Work& work) {
  const auto communicators = make_in_process_communicators(world_size, {.timeout = std::chrono::seconds(20)});
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        work(rank, communicators[static_cast<std::size_t>(rank)]);
      } catch (...) {
        {
          const std::lock_guard<std::mutex> lock(mutex);
          if (!first) first = std::current_exception();
        }
        communicators[static_cast<std::size_t>(rank)]->abort("a test rank has thrown");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace ballast::testing
