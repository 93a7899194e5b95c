// A communicator from a trainer's own MPI_Comm.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/communicators/mpi.h>
#include <mpi.h>

namespace ballast {

inline std::shared_ptr<Communicator> make_mpi_communicator(MPI_Comm communicator,
                                                           const CommunicatorOptions& options = {}) {
  return make_mpi_communicator(MpiOptions{&communicator, false, options});
}

}  // namespace ballast
