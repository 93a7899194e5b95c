// Communicators of a build with MPI.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/communicators/mpi.h>

#include "ranks.h"

namespace ballast::cli {

CommunicatorFactories communicator_factories() {
  CommunicatorFactories factories;
  factories.mpi = [](const CommunicatorOptions& options) {
    return make_mpi_communicator({.initialize = true, .common = options});
  };
  return factories;
}

}  // namespace ballast::cli
