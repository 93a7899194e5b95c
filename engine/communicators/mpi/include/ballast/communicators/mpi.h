// Communicators whose ranks are MPI processes. Link ballast::mpi. This header does not need mpi.h; mpi_native.h takes
// an MPI_Comm as it is.
//
// How it works. Everything goes over one duplicate of the communicator handed in, so a trainer's own messages are never
// touched; communicators made by duplicate() and split() are told apart by tags. In every call each rank first sends
// each other a short greeting that says what it is about to do (small data travels in it); data moves only when all
// agree. Sums are exchanged pairwise and added locally in rank order, in pieces, so that beside the buffers a call
// needs at most 16 MiB (32 KiB a rank beyond 512 ranks), kept for the next. Nothing blocks inside MPI: calls are
// started, then tested until a deadline, ever more rarely, so that a rank that waits does not burn a core. A call costs
// a rank one message to every other at least, which suits tens to some hundreds of CPU ranks.
//
// Failure. A rank that makes no progress within the timeout ends the call at all the others, which tell each other.
// What MPI cannot cancel (a transfer that had begun) may still touch the buffers of a failed call: keep them until the
// process ends, or until the rank is known to be dead. While a rank is missing nothing is freed or finalised that could
// wait for it; mpirun then ends the other ranks when the first process exits. MPI itself ends the job when a connection
// over TCP breaks or, by mpirun, when a process dies; the watchdog is for those that live and do not move.
//
// duplicate() and split() of all communicators of one world: in one order on every rank, as with MPI.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/communicators/options.h>
#include <ballast/engine/communicator.h>

#include <functional>
#include <memory>

namespace ballast {

struct MpiOptions {
  // Points to the MPI_Comm to duplicate, an intracommunicator; null: MPI_COMM_WORLD. Read during the call only.
  const void* communicator = nullptr;
  // Initialise MPI, with MPI_THREAD_MULTIPLE, where nobody has. MPI is then finalised when the last communicator made
  // from it goes (it cannot be initialised again: keep one for the length of the program), unless a rank is missing;
  // then the process stays for a second at its exit, so that mpirun does not end the others before they have said why.
  // A thread of the library's does both, as they wait for other ranks without end: where one is missing it is left
  // behind, and MPI is not started again. What the trainer initialised is left to the trainer, and is to be finalised
  // after the last communicator has gone.
  bool initialize = false;
  CommunicatorOptions common;
};

// Collective over the ranks of that communicator; waits for them no longer than the timeout. Throws UsageError where
// MPI is not initialised (and options do not ask for it), already finalised, or without MPI_THREAD_MULTIPLE, which the
// threads of streams need; CommunicationError where ranks are missing or MPI fails.
std::shared_ptr<Communicator> make_mpi_communicator(const MpiOptions& options);

// For CommunicatorFactories::mpi (bootstrap.h): over MPI_COMM_WORLD, initialising MPI where nobody has.
std::function<std::shared_ptr<Communicator>(const CommunicatorOptions&)> mpi_communicator_factory();

}  // namespace ballast
