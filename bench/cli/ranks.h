// The ranks of a run: who starts them, and what they agree on step by step.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/communicators/bootstrap.h>
#include <ballast/engine/communicator.h>
#include <ballast/engine/config.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace ballast::cli {

struct RunRecord;

// The kinds of communicator that this command was built with: one of two sources, as CMake found MPI or not.
CommunicatorFactories communicator_factories();

// Runs `work` over the ranks of the launch: those that a launcher has started this process in, or one. Standard output
// is rank 0's from here on; errors go to standard error on every rank. An exception that leaves `work` ends the others
// too, with its text; where that is a refusal (ConfigError, PlanError), they throw ConfigError, and all end with 2.
// Throws ConfigError or CommunicationError.
int run_on_ranks(const Config& config, const std::function<int(const std::shared_ptr<Communicator>&)>& work);

// What a file option means on this rank: only rank 0 writes the run's files.
std::string on_first_rank(const Communicator& ranks, const std::string& path);

// One number from every rank, in their order. One small exchange.
std::vector<double> from_all(Communicator& ranks, double value);

// What is known of all ranks of a run: their seconds per step, alone and at their drives. Every rank calls it.
void gather_seconds(Communicator& ranks, RunRecord& record);

// The threads that a rank's own maths should take: OMP_NUM_THREADS where it is set (0 then: the maths sees to that), or
// this rank's share of the machine. Every rank calls it.
int threads_of_maths(Communicator& ranks);

// The mean of a loss over all ranks, and the signal that any of them has seen (0: none). One small exchange.
struct Agreed {
  double mean = 0;
  int signal = 0;
};
Agreed agree(Communicator& ranks, double value, int signal);

}  // namespace ballast::cli
