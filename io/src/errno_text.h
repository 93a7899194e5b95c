// Errno values as people look them up: "EPERM (Operation not permitted)".
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <string>

namespace ballast::io {

// Thread-safe, unlike strerror.
inline std::string errno_text(int error_number) {
  const char* name = ::strerrorname_np(error_number);
  const char* description = ::strerrordesc_np(error_number);
  if (name == nullptr || description == nullptr) return "error " + std::to_string(error_number);
  return std::string(name) + " (" + description + ")";
}

}  // namespace ballast::io
