// Bootstrap: which launcher started this process as which rank, and the communicator that fits.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/communicators/options.h>
#include <ballast/engine/communicator.h>
#include <ballast/engine/config.h>

#include <functional>
#include <memory>
#include <string>

namespace ballast {

// The value of an environment variable, or null.
using VariableLookup = std::function<const char*(const char*)>;
VariableLookup process_environment();  // getenv

enum class Launcher : std::uint8_t {
  none,         // started by hand: one rank
  open_mpi,     // mpirun (OMPI_COMM_WORLD_*)
  other_mpi,    // the launcher of another MPI (PMI_*)
  slurm,        // srun (SLURM_*)
  environment,  // torchrun and its like: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
};
std::string_view to_string(Launcher launcher);  // "mpirun", "srun", ...

struct LaunchInfo {
  Launcher launcher = Launcher::none;
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;  // among the ranks on this machine
  int local_world_size = 1;
  std::string master_address;  // of launcher environment
  int master_port = 0;
  bool process_management = true;  // srun: whether it offers PMI, without which MPI sees single ranks
};

// Reads what launchers leave in the environment. Where several have, the inner one counts: mpirun or torchrun before
// srun (unless a script took RANK and WORLD_SIZE from Slurm's own numbers), and of these two the one that started
// several ranks. Throws ConfigError naming the variable and its value where one means nothing or is missing, or where
// two launchers of several ranks disagree. An empty variable counts as absent.
LaunchInfo detect_launch(const VariableLookup& lookup);

// What a program has at hand to make communicators with. An empty function: not built in.
struct CommunicatorFactories {
  std::function<std::shared_ptr<Communicator>(const CommunicatorOptions&)> mpi;  // over all ranks that mpirun started
  // `bootstrap` carries the NCCL id; null under launcher environment, where master_address and master_port do.
  std::function<std::shared_ptr<Communicator>(const CommunicatorOptions&, const LaunchInfo&,
                                              const std::shared_ptr<Communicator>& bootstrap)>
      nccl;
};

enum class CommunicatorKind : std::uint8_t { single, mpi, nccl };

// What communication.backend means for this launch. `cuda`: whether ranks compute on GPUs. Throws ConfigError with the
// cure: a single rank wanted under a launcher of several; CPU ranks under launcher environment (which cannot start MPI:
// use mpirun); a kind that is not built in; srun without PMI.
CommunicatorKind choose_communicator(const Config& config, bool cuda, const LaunchInfo& launch,
                                     const CommunicatorFactories& factories);

// Throws ConfigError where the world fell apart: the launcher started more ranks than the communicator holds (or
// fewer).
void check_world(const Communicator& communicator, const LaunchInfo& launch);

CommunicatorOptions communicator_options(const Config& config);

// All of the above for this process: the communicator over all ranks of the launch. Collective over them.
std::shared_ptr<Communicator> make_communicator(const Config& config, bool cuda, const CommunicatorFactories& factories,
                                                const VariableLookup& lookup = process_environment());

}  // namespace ballast
