// The contract of communicators over MPI: this program is one rank, started by mpirun with a number of others. All of
// them run the same tests in the same order.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/communicators/mpi_native.h>

#include "communicator_contract.h"

namespace ballast::testing {

std::vector<World> worlds() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return {{"mpi_" + std::to_string(size), size, [](std::chrono::milliseconds timeout, const Body& body) {
             MPI_Barrier(MPI_COMM_WORLD);  // ranks may be late from the test before
             auto communicator = make_mpi_communicator(MPI_COMM_WORLD, {.timeout = timeout});
             body(*communicator);
             communicator.reset();
             MPI_Barrier(MPI_COMM_WORLD);
           }}};
}

namespace {

TEST(MpiCommunicator, TakesPartOfATrainersWorldAndLeavesItsMessagesAlone) {
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Comm part = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &part);
  int mine = 100 + rank;
  int received = 0;
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Irecv(&received, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, part, &request);  // must not take ours
  {
    const auto communicator = make_mpi_communicator(part);
    EXPECT_EQ(communicator->world_size(), (size - rank % 2 + 1) / 2);
    for (int i = 0; i < 10; ++i) {
      double sum = rank;
      communicator->all_reduce_sum({&sum, 1});
      double expected = 0;
      for (int r = rank % 2; r < size; r += 2) expected += r;
      EXPECT_EQ(sum, expected);
    }
  }
  int part_rank = 0;
  MPI_Comm_rank(part, &part_rank);
  MPI_Send(&mine, 1, MPI_INT, part_rank, 5, part);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  EXPECT_EQ(received, mine);
  MPI_Comm_free(&part);
}

TEST(MpiCommunicator, HandlesThatMeanNothingAreUsageErrors) {
  EXPECT_THROW(make_mpi_communicator(MPI_COMM_NULL), UsageError);
  EXPECT_THROW(make_mpi_communicator(MPI_COMM_WORLD, {.timeout = std::chrono::milliseconds(-1)}), UsageError);
}

TEST(MpiCommunicator, RanksThatNeverComeEndTheMaking) {
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size == 1) GTEST_SKIP() << "one rank waits for nobody";
  MPI_Comm all = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &all);
  if (rank != 0) {
    try {
      make_mpi_communicator(all, {.timeout = std::chrono::milliseconds(300)});
      ADD_FAILURE() << "made without rank 0";
    } catch (const CommunicationError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("not all of the " + std::to_string(size) + " ranks came"));
    }
  }
  MPI_Barrier(MPI_COMM_WORLD);
  // The duplication that was begun is still to be made by rank 0, so that MPI ends well.
  if (rank == 0) {
    MPI_Comm late = MPI_COMM_NULL;
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Comm_idup(all, &late, &request);
    int done = 0;
    for (int i = 0; i < 2000 && done == 0; ++i) {
      MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

}  // namespace
}  // namespace ballast::testing

int main(int argc, char** argv) {
  int provided = 0;
  if (MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided) != MPI_SUCCESS) return 1;
  ::testing::InitGoogleTest(&argc, argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank != 0) ::testing::GTEST_FLAG(brief) = true;
  const int result = RUN_ALL_TESTS();
  MPI_Finalize();
  return result;
}
