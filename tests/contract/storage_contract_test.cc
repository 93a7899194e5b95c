// The storage contract, for the back ends and the doubles.
// SPDX-License-Identifier: Apache-2.0
#include "contract/storage_contract.h"

#include <ballast/io/open_storage.h>
#include <ballast/io/testing/faulty_storage.h>
#include <ballast/io/testing/memory_storage.h>
#include <ballast/io/testing/throttled_storage.h>

namespace ballast::io {
namespace {

std::unique_ptr<Storage> threads(const StorageOptions& options) {
  return open_storage(Backend::threads, options).storage;
}

std::unique_ptr<Storage> memory(const StorageOptions& options, std::uint64_t seed) {
  return std::make_unique<testing::MemoryStorage>(options, testing::MemoryStorageOptions{.seed = seed});
}

INSTANTIATE_TEST_SUITE_P(
    Every, StorageContract,
    ::testing::Values(StorageCase{"io_uring",
                                  [](const StorageOptions& o) { return open_storage(Backend::io_uring, o).storage; },
                                  [] {
                                    const std::string reason = io_uring_unavailable_reason();
                                    return reason.empty() ? reason : "no io_uring here: " + reason;
                                  }},
                      StorageCase{"threads", threads},
                      StorageCase{"memory_in_order", [](const StorageOptions& o) { return memory(o, 0); }},
                      StorageCase{"memory_in_any_order", [](const StorageOptions& o) { return memory(o, 7); }},
                      StorageCase{"faulty_late_threads",
                                  [](const StorageOptions& o) {
                                    return std::make_unique<testing::FaultyStorage>(
                                        threads(o), testing::Faults{.seed = 5, .delay_polls_max = 4}, o.wake);
                                  }},
                      StorageCase{"throttled_threads",
                                  [](const StorageOptions& o) {
                                    return std::make_unique<testing::ThrottledStorage>(
                                        threads(o), testing::Throttle{std::chrono::microseconds(200), 4e9}, o.wake);
                                  }}),
    [](const auto& one) { return one.param.name; });

}  // namespace
}  // namespace ballast::io
