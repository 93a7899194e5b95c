// A foreign program over MPI: two ranks that add up, each from a communicator of its own making.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/communicators/mpi.h>

#include <cstdio>
#include <exception>

int main() {
  try {
    const auto world = ballast::make_mpi_communicator({.initialize = true});
    double sum = world->rank() + 1;
    world->all_reduce_sum({&sum, 1});
    const double expected = world->world_size() * (world->world_size() + 1) / 2.0;
    if (sum != expected) std::fprintf(stderr, "sum is %g, not %g\n", sum, expected);
    return sum == expected ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
