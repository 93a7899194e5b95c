// Making written data durable.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <cerrno>

namespace ballast::io {

// Data, and what of the file's description is needed to read it. 0 or an errno. Not repeated after a failure: kernels
// report a lost write once.
inline int flush_data(int descriptor) {
  while (::fdatasync(descriptor) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

}  // namespace ballast::io
