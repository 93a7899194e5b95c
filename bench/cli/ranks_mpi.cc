// Communicators of a build with MPI.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/communicators/mpi.h>

#include "ranks.h"

namespace ballast::cli {

CommunicatorFactories communicator_factories() {
  CommunicatorFactories factories;
  factories.mpi = mpi_communicator_factory();
  return factories;
}

}  // namespace ballast::cli
