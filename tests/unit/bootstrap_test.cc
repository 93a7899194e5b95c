// What launchers leave in the environment, and which communicator follows from it.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>
#include <ballast/communicators/bootstrap.h>
#include <ballast/communicators/in_process.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Variables = std::map<std::string, std::string>;

VariableLookup lookup_in(Variables variables) {
  return [variables = std::move(variables)](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
}

LaunchInfo detect(const Variables& variables) { return detect_launch(lookup_in(variables)); }

template <class Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.what();
  }
  ADD_FAILURE() << "no ConfigError";
  return "";
}

const Variables kMpirun = {{"OMPI_COMM_WORLD_SIZE", "4"},
                           {"OMPI_COMM_WORLD_RANK", "3"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
const Variables kSrun = {{"SLURM_STEP_NUM_TASKS", "7"},
                         {"SLURM_NTASKS", "7"},
                         {"SLURM_PROCID", "6"},
                         {"SLURM_LOCALID", "0"},
                         {"SLURM_NODEID", "3"},
                         {"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"},
                         {"PMIX_RANK", "6"}};
const Variables kTorchrun = {{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "4"},
                             {"MASTER_PORT", "29500"},
                             {"MASTER_ADDR", "node-0"}};

Variables with(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

// Communicators of the size that a factory's MPI "sees".
CommunicatorFactories factories_of(int size) {
  CommunicatorFactories factories;
  factories.mpi = [size](const CommunicatorOptions& options) {
    return make_in_process_communicators(size, options)[0];
  };
  return factories;
}

TEST(DetectLaunch, AProcessStartedByHandIsAloneInTheWorld) {
  const LaunchInfo info = detect({{"HOME", "/"}, {"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}, {"RANK", "general"}});
  EXPECT_EQ(info.launcher, Launcher::none);
  EXPECT_EQ(info.world_size, 1);
  EXPECT_EQ(info.rank, 0);
}

TEST(DetectLaunch, MpirunTellsRankAndPlaceOnTheMachine) {
  const LaunchInfo info = detect(kMpirun);
  EXPECT_EQ(info.launcher, Launcher::open_mpi);
  EXPECT_EQ(info.world_size, 4);
  EXPECT_EQ(info.rank, 3);
  EXPECT_EQ(info.local_rank, 1);
  EXPECT_EQ(info.local_world_size, 2);
}

TEST(DetectLaunch, SrunTellsRankAndPlaceOnTheMachine) {
  LaunchInfo info = detect(kSrun);
  EXPECT_EQ(info.launcher, Launcher::slurm);
  EXPECT_EQ(info.world_size, 7);
  EXPECT_EQ(info.rank, 6);
  EXPECT_EQ(info.local_rank, 0);
  EXPECT_EQ(info.local_world_size, 1);
  EXPECT_TRUE(info.process_management);
  info = detect(with(kSrun, {{"SLURM_NODEID", "2"}, {"SLURM_PROCID", "5"}, {"SLURM_LOCALID", "1"}, {"PMIX_RANK", ""}}));
  EXPECT_EQ(info.local_world_size, 2);
  EXPECT_FALSE(info.process_management);
}

TEST(DetectLaunch, TorchrunTellsRankAndMaster) {
  const LaunchInfo info = detect(kTorchrun);
  EXPECT_EQ(info.launcher, Launcher::environment);
  EXPECT_EQ(info.world_size, 8);
  EXPECT_EQ(info.rank, 5);
  EXPECT_EQ(info.local_rank, 1);
  EXPECT_EQ(info.local_world_size, 4);
  EXPECT_EQ(info.master_address, "node-0");
  EXPECT_EQ(info.master_port, 29500);
}

TEST(DetectLaunch, TheInnerOfTwoLaunchersCounts) {
  EXPECT_EQ(detect(with(kSrun, kMpirun)).launcher, Launcher::open_mpi);
  EXPECT_EQ(detect(with(kSrun, kTorchrun)).launcher, Launcher::environment);
  // torchrun below an mpirun of one rank a node.
  const LaunchInfo info = detect(with(kTorchrun, {{"OMPI_COMM_WORLD_SIZE", "1"}, {"OMPI_COMM_WORLD_RANK", "0"}}));
  EXPECT_EQ(info.launcher, Launcher::environment);
  EXPECT_EQ(info.world_size, 8);
  // A script under srun that names Slurm's numbers anew.
  const LaunchInfo script = detect(with(
      kSrun,
      {{"RANK", "6"}, {"WORLD_SIZE", "7"}, {"LOCAL_RANK", "0"}, {"MASTER_ADDR", "node-0"}, {"MASTER_PORT", "29500"}}));
  EXPECT_EQ(script.launcher, Launcher::slurm);
  EXPECT_EQ(script.master_address, "node-0");
  // The same world by both.
  EXPECT_EQ(detect(with(kMpirun, with(kTorchrun, {{"WORLD_SIZE", "4"}, {"RANK", "3"}}))).launcher, Launcher::open_mpi);
}

TEST(DetectLaunch, TwoLaunchersOfDifferentWorldsAreRefused) {
  EXPECT_THAT(refusal([] { detect(with(kMpirun, kTorchrun)); }), AllOf(HasSubstr("4 ranks"), HasSubstr("8 ranks")));
}

TEST(DetectLaunch, NumbersThatMeanNothingAreRefusedByName) {
  for (const char* const value : {"four", "4x", "-1", "0", "1e3", "99999999999999999999", " 4"}) {
    EXPECT_THAT(refusal([&] {
                  detect(with(kMpirun, {{"OMPI_COMM_WORLD_SIZE", value}}));
                }),
                HasSubstr(std::string("OMPI_COMM_WORLD_SIZE=") + value))
        << value;
  }
  EXPECT_THAT(refusal([] { detect({{"OMPI_COMM_WORLD_SIZE", "4"}}); }), HasSubstr("OMPI_COMM_WORLD_RANK is missing"));
  EXPECT_THAT(refusal([] { detect(with(kMpirun, {{"OMPI_COMM_WORLD_RANK", "4"}})); }), HasSubstr("is not below"));
  EXPECT_THAT(refusal([] { detect(with(kTorchrun, {{"MASTER_PORT", "70000"}})); }), HasSubstr("MASTER_PORT=70000"));
  EXPECT_THAT(refusal([] { detect(with(kTorchrun, {{"LOCAL_RANK", ""}})); }), HasSubstr("LOCAL_RANK is missing"));
  EXPECT_THAT(refusal([] { detect(with(kSrun, {{"SLURM_STEP_TASKS_PER_NODE", "2(y3)"}})); }), HasSubstr("2(y3)"));
  EXPECT_THAT(refusal([] { detect(with(kSrun, {{"SLURM_NODEID", "4"}})); }), HasSubstr("nothing of node 4"));
}

TEST(MakeCommunicator, OneRankIsSingleAndSeveralAreMpi) {
  const Config config;
  EXPECT_EQ(make_communicator(config, false, {}, lookup_in({}))->name(), "single");
  EXPECT_EQ(make_communicator(config, false, factories_of(4), lookup_in(kMpirun))->world_size(), 4);
}

TEST(MakeCommunicator, CpuRanksUnderTorchrunAreToldOfMpirun) {
  for (const char* const backend : {"auto", "mpi"}) {
    Config config;
    config.communication.backend = backend;
    EXPECT_THAT(refusal([&] { make_communicator(config, false, factories_of(8), lookup_in(kTorchrun)); }),
                AllOf(HasSubstr("RANK"), HasSubstr("8 ranks"), HasSubstr("mpirun -n")));
  }
}

TEST(MakeCommunicator, ASingleRankIsRefusedUnderALauncherOfSeveral) {
  Config config;
  config.communication.backend = "single";
  EXPECT_THAT(refusal([&] { make_communicator(config, false, factories_of(4), lookup_in(kMpirun)); }),
              AllOf(HasSubstr("\"single\""), HasSubstr("mpirun started 4 ranks")));
  EXPECT_EQ(make_communicator(config, false, {}, lookup_in({}))->name(), "single");
}

TEST(MakeCommunicator, AWorldThatFellApartIsRefused) {
  EXPECT_THAT(refusal([&] { make_communicator({}, false, factories_of(1), lookup_in(kMpirun)); }),
              AllOf(HasSubstr("fell apart"), HasSubstr("4 ranks"), HasSubstr("holds 1")));
  const Variables other = {{"PMI_SIZE", "2"}, {"PMI_RANK", "1"}};
  EXPECT_THAT(refusal([&] { make_communicator({}, false, factories_of(1), lookup_in(other)); }),
              AllOf(HasSubstr("fell apart"), HasSubstr("Open MPI")));
  EXPECT_THAT(refusal([&] {
                make_communicator({}, false, factories_of(7), lookup_in(with(kSrun, {{"PMIX_RANK", ""}})));
              }),
              HasSubstr("srun --mpi=pmix"));
  // PMI is offered, and MPI finds itself alone with it: each rank would train by itself, and say nothing.
  for (const Variables& pmi : {Variables{}, Variables{{"PMIX_RANK", ""}, {"PMI_RANK", "6"}, {"PMI_FD", "9"}}}) {
    EXPECT_THAT(refusal([&] { make_communicator({}, false, factories_of(1), lookup_in(with(kSrun, pmi))); }),
                AllOf(HasSubstr("fell apart"), HasSubstr("7 ranks"), HasSubstr("holds 1"), HasSubstr("srun --mpi=pmix"),
                      HasSubstr("mpirun within the allocation")));
  }
}

TEST(MakeCommunicator, WhatIsNotBuiltInIsSaid) {
  EXPECT_THAT(refusal([&] { make_communicator({}, false, {}, lookup_in(kMpirun)); }), HasSubstr("-DBALLAST_MPI=ON"));
  Config config;
  config.communication.backend = "nccl";
  EXPECT_THAT(refusal([&] { make_communicator(config, true, factories_of(4), lookup_in(kMpirun)); }),
              HasSubstr("without NCCL"));
  EXPECT_THAT(refusal([&] { make_communicator(config, false, factories_of(4), lookup_in(kMpirun)); }),
              HasSubstr("the device is the host"));
}

TEST(MakeCommunicator, GpusGetNcclWithABootstrapWhereOneExists) {
  int seen_ranks = -1;
  CommunicatorFactories factories = factories_of(4);
  factories.nccl = [&](const CommunicatorOptions& options, const LaunchInfo& launch,
                       const std::shared_ptr<Communicator>& bootstrap) {
    seen_ranks = bootstrap ? bootstrap->world_size() : 0;
    return make_in_process_communicators(launch.world_size, options)[0];
  };
  EXPECT_EQ(make_communicator({}, true, factories, lookup_in(kMpirun))->world_size(), 4);
  EXPECT_EQ(seen_ranks, 4);
  EXPECT_EQ(make_communicator({}, true, factories, lookup_in(kTorchrun))->world_size(), 8);
  EXPECT_EQ(seen_ranks, 0);
  factories.mpi = nullptr;
  EXPECT_THAT(refusal([&] { make_communicator({}, true, factories, lookup_in(kMpirun)); }),
              HasSubstr("built without MPI"));
}

TEST(MakeCommunicator, TheTimeoutIsTheConfigurations) {
  Config config;
  config.communication.timeout_seconds = 0.25;
  EXPECT_EQ(communicator_options(config).timeout, std::chrono::milliseconds(250));
  config.communication.timeout_seconds = 1e300;
  EXPECT_GT(communicator_options(config).timeout, std::chrono::hours(1));
  config.communication.timeout_seconds = 0;
  EXPECT_THAT(refusal([&] { communicator_options(config); }), HasSubstr("communication.timeout_seconds"));
}

}  // namespace
}  // namespace ballast
