// Joining the ranks of a run, and their small agreements.
// SPDX-License-Identifier: Apache-2.0
#include "ranks.h"

#include <ballast/base/error.h>
#include <ballast/communicators/bootstrap.h>
#include <ballast/offload/device_registry.h>

#include <array>
#include <cstdio>
#include <string>
#include <string_view>

#include "gpu.h"

namespace ballast::cli {
namespace {

const std::string kGaveUp = " gave up: ";  // a communicator's words before the reason
const std::string kRefused = "refused: ";

}  // namespace

int run_on_ranks(const Config& config, const std::function<int(const std::shared_ptr<Communicator>&)>& work) {
  const bool cuda = config.device == "cuda" || (config.device == "auto" && offload::automatic_device() == "cuda");
  CommunicatorFactories factories = communicator_factories();
  add_gpu_communicators(factories);
  const std::shared_ptr<Communicator> ranks = make_communicator(config, cuda, factories);
  if (ranks->rank() != 0 && std::freopen("/dev/null", "w", stdout) == nullptr)
    throw IoError("standard output of rank " + std::to_string(ranks->rank()) + " cannot be closed");
  try {
    const int status = work(ranks);
    ranks->barrier();  // a rank that is lost on its last way is missed, too
    return status;
  } catch (const CommunicationError& error) {
    ranks->abort(error.what());
    // What one rank refuses is refused by the run, whoever of them ends first.
    if (std::string_view(error.what()).find(kGaveUp + kRefused) != std::string_view::npos)
      throw ConfigError(error.what());
    throw;
  } catch (const std::exception& error) {
    const bool refused =
        dynamic_cast<const ConfigError*>(&error) != nullptr || dynamic_cast<const PlanError*>(&error) != nullptr;
    ranks->abort((refused ? kRefused : "") + error.what());
    throw;
  }
}

std::string on_first_rank(const Communicator& ranks, const std::string& path) {
  return ranks.rank() == 0 ? path : std::string();
}

Agreed agree(Communicator& ranks, double value, int signal) {
  if (ranks.world_size() == 1) return {value, signal};
  // The sum of the signals is not one of them; the highest that is set tells.
  std::array<double, 3> sums = {value, signal == 2 ? 1.0 : 0.0, signal != 0 && signal != 2 ? 1.0 : 0.0};
  ranks.all_reduce_sum(sums);
  Agreed agreed;
  agreed.mean = sums[0] / ranks.world_size();
  agreed.signal = sums[2] > 0 ? 15 : sums[1] > 0 ? 2 : 0;
  return agreed;
}

}  // namespace ballast::cli
