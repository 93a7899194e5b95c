// Results of MPI calls as errors with words.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/base/error.h>
#include <mpi.h>

#include <string>

namespace ballast::communicators {

std::string mpi_text(int code);

inline void check_mpi(int code, const char* call) {
  if (code != MPI_SUCCESS) throw CommunicationError(std::string(call) + " failed: " + mpi_text(code));
}

}  // namespace ballast::communicators
