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
  const auto lines = examine({folder_});
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
  examine({folder_, folder_ + "/not/there/yet"});
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(Doctor, ADirectoryThatIsNotThereIsExaminedWhereItWouldBe) {
  const std::string path = folder_ + "/not/there/yet";
  EXPECT_NE(line(examine({path}), "direct I/O: " + path).state, State::bad);
}

TEST_F(Doctor, AFileInThePlaceOfADirectoryIsBad) {
  const std::string path = folder_ + "/file";
  std::ofstream(path) << "x";
  const DoctorLine found = line(examine({path}), "path: " + path);
  EXPECT_EQ(found.state, State::bad);
  EXPECT_THAT(found.finding, HasSubstr("is not a directory"));
}

TEST_F(Doctor, ADirectoryThatTakesNoFilesIsBad) {
  const DoctorLine found = line(examine({"/proc/self"}), "direct I/O: /proc/self");
  EXPECT_EQ(found.state, State::bad);
  EXPECT_THAT(found.finding, HasSubstr("errno"));
}

TEST_F(Doctor, AFileSystemInMemoryIsAWarning) {
  if (!fs::is_directory("/dev/shm")) GTEST_SKIP() << "no /dev/shm here";
  const DoctorLine found = line(examine({"/dev/shm"}), "direct I/O: /dev/shm");
  EXPECT_EQ(found.state, State::warning);
  EXPECT_THAT(found.finding, HasSubstr("in memory"));
}

TEST_F(Doctor, WorksUnderASmallLockedMemoryLimit) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_MEMLOCK, &before), 0);
  rlimit small = before;
  small.rlim_cur = std::min<rlim_t>(64 * 1024, before.rlim_max);
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &small), 0);
  const auto lines = examine({});
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &before), 0);
  const DoctorLine found = line(lines, "locked memory");
  EXPECT_NE(found.state, State::bad);
  EXPECT_THAT(found.finding, HasSubstr("64 KiB"));
}

TEST_F(Doctor, ProcessesStartedByMpirunAreAWarning) {
  ASSERT_EQ(setenv("OMPI_COMM_WORLD_SIZE", "4", 1), 0);
  const auto lines = examine({});
  ASSERT_EQ(unsetenv("OMPI_COMM_WORLD_SIZE"), 0);
  EXPECT_EQ(line(lines, "MPI").state, State::warning);
}

}  // namespace
}  // namespace ballast::cli
