// Choosing a storage back end, and opening files for it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/io/storage.h>

#include <memory>
#include <string>

namespace ballast::io {

enum class Backend : std::uint8_t { automatic, io_uring, threads };

struct OpenedStorage {
  std::unique_ptr<Storage> storage;
  std::string reason;  // why this back end: one sentence for people ("io_uring is denied here (EPERM); ...")
};

// automatic takes io_uring where the kernel permits it, the thread pool otherwise. An explicit io_uring that is not
// permitted throws IoError that says why and what would help.
OpenedStorage open_storage(Backend backend, const StorageOptions& options);

// What this kernel and container permit: empty where io_uring works, else the reason with the errno's name.
std::string io_uring_unavailable_reason();

}  // namespace ballast::io
