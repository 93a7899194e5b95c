// Communicators whose ranks are threads of one process.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/communicators/options.h>
#include <ballast/engine/communicator.h>

#include <memory>
#include <vector>

namespace ballast {

// One communicator for each of world_size ranks; element r is rank r's, to be used from that rank's threads. A rank
// reads its peers' buffers in place, so nothing is copied twice: in a reduction each adds up its own part. Calls in the
// steady state allocate nothing. One rank's communicator that is destroyed while others go on counts as a rank that has
// left: whoever waits for it gets a CommunicationError at once. Throws UsageError where world_size is below 1.
std::vector<std::shared_ptr<Communicator>> make_in_process_communicators(int world_size,
                                                                         const CommunicatorOptions& options = {});

}  // namespace ballast
