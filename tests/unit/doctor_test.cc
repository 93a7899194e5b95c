// The doctor tells what is wrong with a directory, leaves nothing behind, and names a cure for everything it complains
// of. SPDX-License-Identifier: Apache-2.0
#include "cli/doctor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include "cli/accelerators.h"

namespace ballast::cli {
namespace {

namespace fs = std::filesystem;
using State = DoctorLine::State;
using testing::HasSubstr;

class Doctor : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "ballast-doctor-test-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }
  static DoctorLine line(const std::vector<DoctorLine>& lines, const std::string& what) {
    const auto found = std::find_if(lines.begin(), lines.end(), [&](const DoctorLine& l) { return l.what == what; });
    if (found == lines.end()) {
      ADD_FAILURE() << "no line for " << what;
      return {};
    }
    return *found;
  }
  std::string folder_;
};

TEST_F(Doctor, EveryComplaintHasACureAndEveryThingIsExamined) {
  const auto lines = examine({folder_}, machine_facts());
  for (const DoctorLine& found : lines) {
    EXPECT_FALSE(found.what.empty());
    EXPECT_FALSE(found.finding.empty()) << found.what;
    if (found.state != State::good) {
      EXPECT_FALSE(found.cure.empty()) << found.what;
    }
  }
  for (const std::string what : {"io_uring", "locked memory", "huge pages", "NUMA", "memory", "CPUs",
                                 "instruction sets", "GPU", "NCCL", "MPI"}) {
    EXPECT_FALSE(line(lines, what).finding.empty());
  }
  EXPECT_NE(line(lines, "direct I/O: " + folder_).state, State::bad);
  line(lines, "free space: " + folder_);
}

TEST_F(Doctor, LeavesNothingBehind) {
  examine({folder_, folder_ + "/not/there/yet"}, machine_facts());
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(Doctor, ADirectoryThatIsNotThereIsExaminedWhereItWouldBe) {
  const std::string path = folder_ + "/not/there/yet";
  EXPECT_NE(line(examine({path}, machine_facts()), "direct I/O: " + path).state, State::bad);
}

TEST_F(Doctor, AFileInThePlaceOfADirectoryIsBad) {
  const std::string path = folder_ + "/file";
  std::ofstream(path) << "x";
  const DoctorLine found = line(examine({path}, machine_facts()), "path: " + path);
  EXPECT_EQ(found.state, State::bad);
  EXPECT_THAT(found.finding, HasSubstr("is not a directory"));
}

TEST_F(Doctor, ADirectoryThatTakesNoFilesIsBad) {
  const DoctorLine found = line(examine({"/proc/self"}, machine_facts()), "direct I/O: /proc/self");
  EXPECT_EQ(found.state, State::bad);
  EXPECT_THAT(found.finding, HasSubstr("errno"));
}

TEST_F(Doctor, AFileSystemInMemoryIsAWarning) {
  if (!fs::is_directory("/dev/shm")) GTEST_SKIP() << "no /dev/shm here";
  const DoctorLine found = line(examine({"/dev/shm"}, machine_facts()), "direct I/O: /dev/shm");
  EXPECT_EQ(found.state, State::warning);
  EXPECT_THAT(found.finding, HasSubstr("in memory"));
}

TEST_F(Doctor, WorksUnderASmallLockedMemoryLimit) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_MEMLOCK, &before), 0);
  rlimit small = before;
  small.rlim_cur = std::min<rlim_t>(64 * 1024, before.rlim_max);
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &small), 0);
  const auto lines = examine({}, machine_facts());
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &before), 0);
  const DoctorLine found = line(lines, "locked memory");
  EXPECT_NE(found.state, State::bad);
  EXPECT_THAT(found.finding, HasSubstr("64 KiB"));
}

TEST_F(Doctor, ProcessesStartedByMpirunAreAWarning) {
  ASSERT_EQ(setenv("OMPI_COMM_WORLD_SIZE", "4", 1), 0);
  const auto lines = examine({}, machine_facts());
  ASSERT_EQ(unsetenv("OMPI_COMM_WORLD_SIZE"), 0);
  EXPECT_EQ(line(lines, "MPI").state, State::warning);
}

// --- GPUs, NCCL and MPI, from made-up facts
// ---------------------------------------------------------------------------

DoctorLine named(const std::vector<DoctorLine>& lines, const std::string& what) {
  const auto found = std::find_if(lines.begin(), lines.end(), [&](const DoctorLine& l) { return l.what == what; });
  if (found == lines.end()) throw std::runtime_error("no line for " + what);
  return *found;
}

AcceleratorFacts one_gpu() {
  AcceleratorFacts facts;
  facts.cuda_built = facts.nccl_built = facts.mpi_built = true;
  facts.device_node = facts.driver_library = facts.nccl_library = facts.mpirun = facts.mpi_library = true;
  facts.runtime_version = 13000;
  facts.driver_version = 13010;
  facts.nccl_version = 22809;
  facts.gpus.push_back({.number = 0,
                        .name = "Some GPU",
                        .compute_major = 9,
                        .compute_minor = 0,
                        .memory_bytes = std::uint64_t{80} << 30,
                        .free_bytes = std::uint64_t{79} << 30,
                        .pci = "0000:17:00.0",
                        .numa_node = 1,
                        .link_speed_most = "32.0 GT/s PCIe",
                        .link_speed_now = "2.5 GT/s PCIe",
                        .link_width_most = 16,
                        .link_width_now = 16,
                        .trouble = ""});
  return facts;
}

TEST(DoctorAccelerators, AGpuIsToldWithMemoryDriverLinkAndNode) {
  const auto lines = accelerator_lines(one_gpu());
  EXPECT_EQ(lines.size(), 4u);
  for (const DoctorLine& line : lines) {
    EXPECT_EQ(line.state, State::good) << line.what << ": " << line.finding;
    EXPECT_EQ(line.cure, "");
  }
  EXPECT_EQ(named(lines, "GPU").finding, "1 to be used; CUDA 13.0 is built in; the driver serves up to CUDA 13.1");
  EXPECT_EQ(named(lines, "GPU 0").finding,
            "Some GPU, compute capability 9.0, 80 GiB of which 79 GiB are free; link to the host 32.0 GT/s PCIe x "
            "16 (now 2.5 GT/s PCIe x 16); NUMA node 1; PCI 0000:17:00.0");
  EXPECT_THAT(named(lines, "NCCL").finding, HasSubstr("2.28.9 is built in"));
  EXPECT_THAT(named(lines, "MPI").finding, HasSubstr("built in; mpirun found, library found"));
}

TEST(DoctorAccelerators, WhatTheSystemDoesNotTellIsSaidToBeUnknown) {
  AcceleratorFacts facts = one_gpu();
  facts.gpus[0].link_speed_most = facts.gpus[0].link_speed_now = facts.gpus[0].pci = "";
  facts.gpus[0].link_width_most = facts.gpus[0].link_width_now = 0;
  facts.gpus[0].numa_node = -1;
  facts.nccl_version = 0;
  const auto lines = accelerator_lines(facts);
  EXPECT_THAT(named(lines, "GPU 0").finding,
              testing::EndsWith("free; link to the host not known; NUMA node not known"));
  EXPECT_THAT(named(lines, "NCCL").finding, HasSubstr("of an unknown version"));
}

TEST(DoctorAccelerators, ABuildWithoutCudaSaysSoInOneLine) {
  const auto lines = accelerator_lines({});
  EXPECT_EQ(lines.size(), 3u);
  EXPECT_EQ(named(lines, "GPU").state, State::good);
  EXPECT_THAT(named(lines, "GPU").finding, HasSubstr("no CUDA back end in this build"));
  AcceleratorFacts with_gpu;
  with_gpu.device_node = true;
  const DoctorLine line = named(accelerator_lines(with_gpu), "GPU");
  EXPECT_EQ(line.state, State::warning);
  EXPECT_THAT(line.finding, HasSubstr("no CUDA back end"));
  EXPECT_THAT(line.cure, HasSubstr("-DBALLAST_CUDA=ON"));
}

TEST(DoctorAccelerators, TroubleWithAGpuIsToldWithACure) {
  const auto gpu_after = [](auto change) {
    AcceleratorFacts facts = one_gpu();
    change(facts);
    return named(accelerator_lines(facts), "GPU 0");
  };
  const DoctorLine broken = gpu_after([](AcceleratorFacts& f) { f.gpus[0].trouble = "cudaMemGetInfo failed"; });
  EXPECT_EQ(broken.state, State::bad);
  EXPECT_EQ(broken.finding, "Some GPU: cudaMemGetInfo failed");
  EXPECT_THAT(broken.cure, HasSubstr("nvidia-smi"));
  const DoctorLine old = gpu_after([](AcceleratorFacts& f) { f.gpus[0].compute_major = 7; });
  EXPECT_EQ(old.state, State::bad);
  EXPECT_THAT(old.finding, HasSubstr("8.0 or more"));
  const DoctorLine narrow = gpu_after([](AcceleratorFacts& f) { f.gpus[0].link_width_now = 8; });
  EXPECT_EQ(narrow.state, State::warning);
  EXPECT_THAT(narrow.cure, HasSubstr("fewer lanes"));
  const DoctorLine full = gpu_after([](AcceleratorFacts& f) { f.gpus[0].free_bytes = 1 << 20; });
  EXPECT_EQ(full.state, State::warning);
  EXPECT_THAT(full.cure, HasSubstr("budget.device"));
}

TEST(DoctorAccelerators, ADriverThatIsMissingOrOldIsTold) {
  AcceleratorFacts facts = one_gpu();
  facts.driver_version = 12080;
  DoctorLine line = named(accelerator_lines(facts), "GPU");
  EXPECT_EQ(line.state, State::bad);
  EXPECT_THAT(line.cure, HasSubstr("driver for CUDA 13.0"));

  facts.gpus.clear();
  facts.driver_version = 0;
  facts.driver_library = false;
  facts.cuda_trouble = "cudaErrorInsufficientDriver";
  line = named(accelerator_lines(facts), "GPU");
  EXPECT_EQ(line.state, State::bad);
  EXPECT_THAT(line.finding, HasSubstr("cudaErrorInsufficientDriver"));
  EXPECT_THAT(line.cure, HasSubstr("Install the NVIDIA driver"));
  facts.driver_library = true;
  facts.driver_version = 13000;
  EXPECT_THAT(named(accelerator_lines(facts), "GPU").cure, HasSubstr("CUDA_VISIBLE_DEVICES"));
  facts.device_node = false;
  EXPECT_EQ(named(accelerator_lines(facts), "GPU").state, State::good);  // no GPU is no trouble
}

TEST(DoctorAccelerators, SeveralGpusWithoutNcclAndMpiWithoutItsLauncherAreWarnings) {
  AcceleratorFacts facts = one_gpu();
  facts.gpus.push_back(facts.gpus[0]);
  facts.gpus[1].number = 1;
  EXPECT_EQ(accelerator_lines(facts).size(), 5u);
  facts.nccl_built = false;
  EXPECT_EQ(named(accelerator_lines(facts), "NCCL").state, State::warning);
  EXPECT_THAT(named(accelerator_lines(facts), "NCCL").cure, HasSubstr("BALLAST_NCCL"));
  facts.mpirun = false;
  EXPECT_EQ(named(accelerator_lines(facts), "MPI").state, State::warning);
  EXPECT_THAT(named(accelerator_lines(facts), "MPI").cure, HasSubstr("openmpi-bin"));
}

}  // namespace
}  // namespace ballast::cli
