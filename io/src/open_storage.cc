// Choosing a back end, and saying why.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/io/open_storage.h>

#include <cerrno>

#include "thread_storage.h"
#include "uring_storage.h"

namespace ballast::io {
namespace {

std::string explain(const UringUnavailable& error) {
  std::string text = error.what();
  switch (error.error_number()) {
    case EPERM:
    case EACCES:
      text +=
          "; a container's system-call filter or kernel.io_uring_disabled forbids it: allow io_uring_setup, "
          "io_uring_enter and "
          "io_uring_register, or set kernel.io_uring_disabled=0";
      break;
    case ENOSYS:
    case EOPNOTSUPP:
      text += "; this kernel lacks it or a filter hides it: Linux 5.6 or later is needed";
      break;
    case ENOMEM:
      text += "; the locked-memory limit is too small for a ring: raise it (ulimit -l)";
      break;
    case EMFILE:
    case ENFILE:
      text += "; too many open files: raise the limit (ulimit -n)";
      break;
    default:
      break;
  }
  return text;
}

}  // namespace

OpenedStorage open_storage(Backend backend, const StorageOptions& options) {
  if (backend == Backend::threads) return {make_thread_storage(options), "threads, as asked for"};
  try {
    return {make_uring_storage(options),
            backend == Backend::automatic ? "io_uring, which works here" : "io_uring, as asked for"};
  } catch (const UringUnavailable& error) {
    if (backend == Backend::io_uring) throw IoError("the io_uring back end is not available: " + explain(error));
    return {make_thread_storage(options), "threads, because io_uring is not available: " + explain(error)};
  }
}

std::string io_uring_unavailable_reason() {
  try {
    make_uring_storage({.queue_depth = 1});
    return {};
  } catch (const UringUnavailable& error) {
    return explain(error);
  }
}

}  // namespace ballast::io
