// Communicators of a build without MPI.
// SPDX-License-Identifier: Apache-2.0
#include "ranks.h"

namespace ballast::cli {

CommunicatorFactories communicator_factories() { return {}; }

}  // namespace ballast::cli
