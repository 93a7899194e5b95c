// Launchers, by what they leave in the environment.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/communicators/bootstrap.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

namespace ballast {
namespace {

constexpr int kMostRanks = 1 << 24;
constexpr int kMostPort = 65534;  // the one after it is used as well

class Environment {
 public:
  explicit Environment(const VariableLookup& lookup) : lookup_(lookup) {}

  bool has(const char* name) const { return text(name) != nullptr; }

  std::optional<int> number(const char* name, int least, int most) const {
    const char* const value = text(name);
    if (value == nullptr) return std::nullopt;
    int number = 0;
    const char* const end = value + std::strlen(value);
    const auto result = std::from_chars(value, end, number);
    if (result.ec != std::errc() || result.ptr != end || number < least || number > most) {
      throw ConfigError(std::string(name) + "=" + value + " in the environment: a whole number from " +
                        std::to_string(least) + " to " + std::to_string(most) + " was expected");
    }
    return number;
  }

  int require(const char* name, int least, int most, const char* because) const {
    const auto value = number(name, least, most);
    if (!value) throw ConfigError(std::string(name) + " is missing in the environment, where " + because + " is set");
    return *value;
  }

  // An empty variable counts as absent.
  const char* text(const char* name) const {
    const char* const value = lookup_(name);
    return value == nullptr || *value == '\0' ? nullptr : value;
  }

 private:
  const VariableLookup& lookup_;
};

// The tasks on node `node` of "2(x3),1" (Slurm's SLURM_STEP_TASKS_PER_NODE: two on each of three, then one).
std::optional<int> tasks_on_node(std::string_view list, int node) {
  while (!list.empty()) {
    const std::string_view entry = list.substr(0, list.find(','));
    list.remove_prefix(std::min(list.size(), entry.size() + 1));
    int tasks = 0;
    int nodes = 1;
    const auto count = std::from_chars(entry.begin(), entry.end(), tasks);
    if (count.ec != std::errc() || tasks < 1) return std::nullopt;
    const std::string_view rest(count.ptr, static_cast<std::size_t>(entry.end() - count.ptr));
    if (!rest.empty()) {
      if (!rest.starts_with("(x") || !rest.ends_with(")")) return std::nullopt;
      const std::string_view number = rest.substr(2, rest.size() - 3);
      const auto repeat = std::from_chars(number.begin(), number.end(), nodes);
      if (repeat.ec != std::errc() || repeat.ptr != number.end() || nodes < 1) return std::nullopt;
    }
    if (node < nodes) return tasks;
    node -= nodes;
  }
  return std::nullopt;
}

void check_ranks(const LaunchInfo& info, const char* rank_name, const char* size_name) {
  if (info.rank >= info.world_size) {
    throw ConfigError(std::string(rank_name) + "=" + std::to_string(info.rank) + " is not below " + size_name + "=" +
                      std::to_string(info.world_size));
  }
  if (info.local_rank >= info.local_world_size) {
    throw ConfigError("local rank " + std::to_string(info.local_rank) + " is not below the " +
                      std::to_string(info.local_world_size) + " ranks on this machine, by the environment of " +
                      std::string(to_string(info.launcher)));
  }
}

std::optional<LaunchInfo> open_mpi(const Environment& environment) {
  const auto size = environment.number("OMPI_COMM_WORLD_SIZE", 1, kMostRanks);
  if (!size) return std::nullopt;
  LaunchInfo info;
  info.launcher = Launcher::open_mpi;
  info.world_size = *size;
  info.rank = environment.require("OMPI_COMM_WORLD_RANK", 0, kMostRanks, "OMPI_COMM_WORLD_SIZE");
  info.local_rank = environment.number("OMPI_COMM_WORLD_LOCAL_RANK", 0, kMostRanks).value_or(0);
  info.local_world_size = environment.number("OMPI_COMM_WORLD_LOCAL_SIZE", 1, kMostRanks).value_or(info.local_rank + 1);
  check_ranks(info, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  return info;
}

std::optional<LaunchInfo> slurm(const Environment& environment) {
  // In a batch script itself SLURM_NTASKS and SLURM_PROCID are set too; only srun sets those of a step.
  const auto size = environment.number("SLURM_STEP_NUM_TASKS", 1, kMostRanks);
  if (!size || !environment.has("SLURM_PROCID")) return std::nullopt;
  LaunchInfo info;
  info.launcher = Launcher::slurm;
  info.world_size = *size;
  info.rank = environment.require("SLURM_PROCID", 0, kMostRanks, "SLURM_STEP_NUM_TASKS");
  info.local_rank = environment.number("SLURM_LOCALID", 0, kMostRanks).value_or(0);
  info.local_world_size = info.local_rank + 1;
  if (const char* const tasks = environment.text("SLURM_STEP_TASKS_PER_NODE")) {
    const int node = environment.number("SLURM_NODEID", 0, kMostRanks).value_or(0);
    const auto count = tasks_on_node(tasks, node);
    if (!count) {
      throw ConfigError(std::string("SLURM_STEP_TASKS_PER_NODE=") + tasks +
                        " in the environment says nothing of node " + std::to_string(node));
    }
    info.local_world_size = *count;
  }
  info.process_management = environment.has("PMIX_RANK") || environment.has("PMI_RANK") || environment.has("PMI_FD");
  check_ranks(info, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS");
  return info;
}

std::optional<LaunchInfo> other_mpi(const Environment& environment) {
  const auto size = environment.number("PMI_SIZE", 1, kMostRanks);
  if (!size) return std::nullopt;
  LaunchInfo info;
  info.launcher = Launcher::other_mpi;
  info.world_size = *size;
  info.rank = environment.require("PMI_RANK", 0, kMostRanks, "PMI_SIZE");
  info.local_rank = environment.number("MPI_LOCALRANKID", 0, kMostRanks).value_or(0);
  info.local_world_size = environment.number("MPI_LOCALNRANKS", 1, kMostRanks).value_or(info.local_rank + 1);
  check_ranks(info, "PMI_RANK", "PMI_SIZE");
  return info;
}

std::optional<LaunchInfo> by_variables(const Environment& environment) {
  // Each of these names alone is in use for other things.
  if (!environment.has("RANK") || !environment.has("WORLD_SIZE") || !environment.has("MASTER_ADDR")) {
    return std::nullopt;
  }
  LaunchInfo info;
  info.launcher = Launcher::environment;
  info.world_size = environment.require("WORLD_SIZE", 1, kMostRanks, "RANK");
  info.rank = environment.require("RANK", 0, kMostRanks, "WORLD_SIZE");
  info.local_rank = environment.require("LOCAL_RANK", 0, kMostRanks, "RANK");
  info.local_world_size = environment.number("LOCAL_WORLD_SIZE", 1, kMostRanks).value_or(info.local_rank + 1);
  info.master_address = environment.text("MASTER_ADDR");
  info.master_port = environment.require("MASTER_PORT", 1, kMostPort, "MASTER_ADDR");
  check_ranks(info, "RANK", "WORLD_SIZE");
  return info;
}

std::string ranks_of(const LaunchInfo& launch) {
  return std::string(to_string(launch.launcher)) + " started " + std::to_string(launch.world_size) + " ranks";
}

constexpr const char* kCureOfSrun =
    "Use srun --mpi=pmix (srun --mpi=list tells what there is), or mpirun within the allocation";
constexpr const char* kUseMpirun = "start CPU ranks with mpirun -n RANKS ballast ...";

}  // namespace

VariableLookup process_environment() {
  return [](const char* name) -> const char* { return std::getenv(name); };
}

std::string_view to_string(Launcher launcher) {
  switch (launcher) {
    case Launcher::none:
      return "no launcher";
    case Launcher::open_mpi:
      return "mpirun";
    case Launcher::other_mpi:
      return "the launcher of another MPI (PMI_SIZE)";
    case Launcher::slurm:
      return "srun";
    case Launcher::environment:
      return "a launcher that sets RANK and WORLD_SIZE";
  }
  return "an unknown launcher";
}

LaunchInfo detect_launch(const VariableLookup& lookup) {
  const Environment environment(lookup);
  const auto mpirun = open_mpi(environment);
  const auto variables = by_variables(environment);
  auto found = mpirun;
  if (variables && (!mpirun || (mpirun->world_size == 1 && variables->world_size > 1))) {
    found = variables;
  } else if (variables && variables->world_size > 1 && variables->world_size != mpirun->world_size) {
    throw ConfigError(ranks_of(*mpirun) + ", and " + ranks_of(*variables) +
                      ": both have left their variables in the environment. Unset those of the one that did not start "
                      "this process");
  }
  // Slurm starts the daemons of mpirun and torchrun with srun, so it is the outer one; but scripts under srun set RANK
  // and WORLD_SIZE from Slurm's own numbers.
  if (!mpirun) {
    if (auto step = slurm(environment)) {
      const bool same = variables && step->rank == variables->rank && step->world_size == variables->world_size;
      if (same) {
        step->master_address = variables->master_address;
        step->master_port = variables->master_port;
      }
      if (!found || (same && step->process_management)) found = step;
    }
  }
  if (!found) found = other_mpi(environment);
  return found.value_or(LaunchInfo{});
}

CommunicatorOptions communicator_options(const Config& config) {
  CommunicatorOptions options;
  const double milliseconds = config.communication.timeout_seconds * 1000;
  const auto most = static_cast<double>(std::numeric_limits<std::int64_t>::max() / 2);
  if (!(milliseconds >= 1)) {
    throw ConfigError("communication.timeout_seconds is " + std::to_string(config.communication.timeout_seconds) +
                      ": at least 0.001");
  }
  options.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(std::min(milliseconds, most)));
  return options;
}

CommunicatorKind choose_communicator(const Config& config, bool cuda, const LaunchInfo& launch,
                                     const CommunicatorFactories& factories) {
  const std::string& backend = config.communication.backend;
  const bool several = launch.world_size > 1;
  const std::string why = "communication.backend is \"" + backend + "\"";
  CommunicatorKind kind = CommunicatorKind::single;
  if (backend == "single") {
    if (several) {
      throw ConfigError(why + ", but " + ranks_of(launch) +
                        ": each would train alone. Use \"auto\", or start one process");
    }
  } else if (backend == "mpi") {
    kind = CommunicatorKind::mpi;
  } else if (backend == "nccl") {
    if (!cuda) throw ConfigError(why + ", which moves data between GPUs, but the device is the host. Use \"mpi\"");
    kind = CommunicatorKind::nccl;
  } else if (backend == "auto") {
    if (several) kind = cuda && factories.nccl ? CommunicatorKind::nccl : CommunicatorKind::mpi;
  } else {
    throw ConfigError(why + ": one of auto, single, mpi, nccl");
  }

  if (kind == CommunicatorKind::mpi && launch.launcher == Launcher::environment && several) {
    throw ConfigError(ranks_of(launch) +
                      " (RANK, WORLD_SIZE, MASTER_ADDR), which serves ranks on GPUs over NCCL only: " + kUseMpirun);
  }
  if (kind == CommunicatorKind::mpi && !factories.mpi) {
    throw ConfigError((several ? ranks_of(launch) : why) +
                      ", but this program was built without MPI. Install libopenmpi-dev and openmpi-bin and build with "
                      "-DBALLAST_MPI=ON");
  }
  if (kind == CommunicatorKind::nccl && !factories.nccl) {
    throw ConfigError(why + ", but this program was built without NCCL. Build with -DBALLAST_CUDA=ON where NCCL is");
  }
  if (several && launch.launcher == Launcher::slurm && !launch.process_management) {
    throw ConfigError("srun started " + std::to_string(launch.world_size) +
                      " ranks without PMI, so that MPI sees single ranks. " + kCureOfSrun);
  }
  return kind;
}

void check_world(const Communicator& communicator, const LaunchInfo& launch) {
  const int actual = communicator.world_size();
  if (launch.launcher == Launcher::none || actual == launch.world_size) return;
  std::string text = "the world fell apart: " + ranks_of(launch) + ", but the " + std::string(communicator.name()) +
                     " communicator holds " + std::to_string(actual) + ". ";
  if (launch.launcher == Launcher::other_mpi) {
    text += "This program uses Open MPI; start it with Open MPI's mpirun";
  } else if (launch.launcher == Launcher::slurm) {
    text += std::string("Its PMI is not one that this MPI library speaks. ") + kCureOfSrun;
  } else {
    text +=
        "The MPI library and the launcher do not belong together; use the mpirun of the MPI that this program was "
        "built with";
  }
  throw ConfigError(text);
}

std::shared_ptr<Communicator> make_communicator(const Config& config, bool cuda, const CommunicatorFactories& factories,
                                                const VariableLookup& lookup) {
  const LaunchInfo launch = detect_launch(lookup);
  const CommunicatorOptions options = communicator_options(config);
  switch (choose_communicator(config, cuda, launch, factories)) {
    case CommunicatorKind::single:
      return make_single_communicator();
    case CommunicatorKind::mpi: {
      auto communicator = factories.mpi(options);
      check_world(*communicator, launch);
      return communicator;
    }
    case CommunicatorKind::nccl: {
      std::shared_ptr<Communicator> bootstrap;
      if (launch.world_size == 1) {
        bootstrap = make_single_communicator();
      } else if (launch.launcher != Launcher::environment) {
        if (!factories.mpi) {
          throw ConfigError(ranks_of(launch) +
                            ", but this program was built without MPI, which carries the NCCL id "
                            "there. Build with -DBALLAST_MPI=ON, or use torchrun");
        }
        bootstrap = factories.mpi(options);
        check_world(*bootstrap, launch);
      }
      auto communicator = factories.nccl(options, launch, bootstrap);
      check_world(*communicator, launch);
      return communicator;
    }
  }
  throw ConfigError("communication.backend: no such kind");
}

}  // namespace ballast
