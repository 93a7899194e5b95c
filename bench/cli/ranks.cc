// Joining the ranks of a run, and their small agreements.
// SPDX-License-Identifier: Apache-2.0
#include "ranks.h"

#include <ballast/base/error.h>
#include <ballast/communicators/agreement.h>
#include <ballast/communicators/bootstrap.h>
#include <ballast/io/directories.h>
#include <ballast/offload/device_registry.h>
#include <ballast/offload/machine_share.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>

#include "gpu.h"
#include "run_record.h"

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
    const bool refused = dynamic_cast<const ConfigError*>(&error) != nullptr ||
                         dynamic_cast<const PlanError*>(&error) != nullptr ||
                         dynamic_cast<const io::UnusablePath*>(&error) != nullptr;
    ranks->abort((refused ? kRefused : "") + error.what());
    throw;
  }
}

std::string on_first_rank(const Communicator& ranks, const std::string& path) {
  return ranks.rank() == 0 ? path : std::string();
}

std::vector<double> from_all(Communicator& ranks, double value) {
  std::vector<double> values(static_cast<std::size_t>(ranks.world_size()));
  ranks.all_gather(std::as_bytes(std::span(&value, 1)), std::as_writable_bytes(std::span(values)));
  return values;
}

void gather_seconds(Communicator& ranks, RunRecord& record) {
  record.rank_step_seconds = from_all(ranks, record.steady_step_seconds());
  record.rank_nvme_seconds =
      from_all(ranks, std::max(record.bound_seconds(Lane::nvme_read), record.bound_seconds(Lane::nvme_write)));
}

int threads_of_maths(Communicator& ranks) {
  const offload::Topology topology = offload::discover_topology();
  const std::vector<std::string> texts = gather_texts(ranks, offload::machine_text(topology));
  const char* const set = std::getenv("OMP_NUM_THREADS");
  if (ranks.world_size() == 1 || (set != nullptr && *set != '\0')) return 0;
  return offload::machine_share(topology, texts, static_cast<std::size_t>(ranks.rank())).threads;
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
