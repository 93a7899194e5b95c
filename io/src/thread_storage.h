// The thread-pool back end's door; only open_storage and tests use it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/io/storage.h>

#include <memory>

#include "result_hook.h"

namespace ballast::io {

// At most this many threads, whatever the queue depth: more gain nothing at one mebibyte a request.
constexpr std::uint32_t kMaxStorageThreads = 32;

// min(queue_depth, kMaxStorageThreads) threads, or as many as a process limit allows, at least one. Throws ConfigError
// (options) or IoError (not one thread can be started).
std::unique_ptr<Storage> make_thread_storage(const StorageOptions& options, ResultHook hook = {});

}  // namespace ballast::io
