// Each function of CUDA and of NCCL that the back ends call, as the stand-in lists them, fails at its first call and at
// later ones while one rank trains, and while four do: the run ends in a typed error that names the call, hangs nowhere
// and leaves nothing behind.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <typeinfo>

#include "support/sanitizers.h"
#include "support/standin_support.h"

namespace ballast {
namespace {

using namespace std::chrono_literals;
using testing::Case;
using testing::gpu_rank;
using ::testing::HasSubstr;
using testing::number_from;
using testing::of_rank;
using testing::on_device;
using testing::on_ranks;
using testing::plain_config;
using testing::SyntheticOptions;
using testing::SyntheticTrainer;
using testing::TemporaryDirectory;
using testing::Watchdog;

// What gives back: when it fails there is nobody left to tell, and nothing to do about it. It must hang and leak
// nothing, and change no number.
const std::set<std::string> kGiveBack = {"cudaEventDestroy",   "cudaFree",          "cudaFreeHost",
                                         "cudaHostUnregister", "cudaStreamDestroy", "ncclCommAbort",
                                         "ncclCommDeregister", "ncclCommDestroy",   "ncclCommFinalize"};
// What may fail without harm: it makes things faster.
const std::set<std::string> kMayFail = {"ncclCommRegister", "cudaDeviceGetPCIBusId"};
// Never called by a training run: what tells people about the machine, and communicators that a trainer hands in.
const std::set<std::string> kNotInTraining = {"cudaDriverGetVersion", "cudaRuntimeGetVersion", "ncclCommCount",
                                              "ncclCommCuDevice",     "ncclCommUserRank",      "ncclGetVersion"};
// Those of looking for a device, where the configuration is to blame.
const std::set<std::string> kFindDevice = {"cudaDeviceGetAttribute", "cudaGetDeviceCount", "cudaGetDeviceProperties",
                                           "cudaGetDriverEntryPointByVersion"};

// Streams that are not ordered run into one another until the failure is seen: a race on purpose, which the thread
// sanitizer would report.
bool races(const std::string& function) {
  return test::kUnderThreadSanitizer &&
         (function == "cudaEventRecord" || function == "cuStreamWaitValue32" || function == "cudaStreamWaitEvent");
}

std::string kind_of(const Error& error) {
  if (dynamic_cast<const PlanError*>(&error)) return "PlanError";
  if (dynamic_cast<const ConfigError*>(&error)) return "ConfigError";
  if (dynamic_cast<const IoError*>(&error)) return "IoError";
  if (dynamic_cast<const CommunicationError*>(&error)) return "CommunicationError";
  return typeid(error) == typeid(Error) ? "Error" : "another";
}

using Calls = std::map<std::string, std::uint64_t>;
Calls all_calls() {
  Calls calls;
  for (const std::string& function : standin::functions()) calls[function] = standin::calls(function);
  return calls;
}

struct Ended {
  std::string kind, text;     // of the error; empty: trained to the end
  Calls calls;                // before the end, when there was somebody to tell
  std::vector<float> values;  // where it trained to the end
};

// Two steps of a small model, as a program would run them.
Ended train(const Config& config, const std::function<EngineEnvironment()>& make_environment, const Case& c) {
  Ended ended;
  EngineEnvironment environment;
  try {
    environment = make_environment();
    Engine engine(config, environment);
    SyntheticTrainer trainer(engine, c.model, c.options);
    engine.commit();
    trainer.initialize();
    for (int step = 0; step < 2; ++step) trainer.step();
    ended.values = trainer.values();
    // The engine may be reading ahead, for steps that never come: what has failed so far is told by the next call.
    ended.calls = all_calls();
    engine.settle();
  } catch (const Error& error) {
    ended.kind = kind_of(error);
    ended.text = error.what();
    if (environment.communicator) environment.communicator->abort(error.what());  // as a program does that leaves
  }
  return ended;
}

Case small_case() {
  Case c;
  c.model = testing::small_model(2);
  on_device(c.options);
  return c;
}

// Calls among `calls` to fail at: the first, the last, and some between.
std::vector<std::uint64_t> places(std::uint64_t calls, std::uint64_t parts) {
  std::set<std::uint64_t> chosen;
  for (std::uint64_t part = 0; part < parts && calls > 0; ++part) {
    chosen.insert(1 + (calls - 1) * part / std::max<std::uint64_t>(1, parts - 1));
  }
  return {chosen.begin(), chosen.end()};
}

// The error's kind and text are those of that call failing so.
void expect_right(const Ended& ended, const std::string& function, cudaError_t error, bool sticky) {
  EXPECT_NE(ended.text, "") << "nothing was thrown";
  // A kernel of the trainer's is its own to tell, and may be the first to find a dead device.
  if ((function == "launch" || sticky) && ended.kind == "Error") return;
  if (kFindDevice.contains(function)) {
    EXPECT_EQ(ended.kind, "ConfigError") << ended.text;
  } else if (ended.kind == "ConfigError") {  // the device was being chosen: its number is of the configuration
    EXPECT_TRUE(sticky || function == "cudaGetDevice" || function == "cudaSetDevice") << ended.text;
  } else if (ended.kind == "PlanError") {
    // What cannot be had, told with numbers.
    EXPECT_EQ(error, cudaErrorMemoryAllocation) << ended.text;
    EXPECT_THAT(ended.text, HasSubstr("bytes"));
  } else {
    EXPECT_TRUE(ended.kind == "IoError" || ended.kind == "CommunicationError") << ended.kind << ": " << ended.text;
  }
  EXPECT_THAT(ended.text, ::testing::AnyOf(HasSubstr("cudaError"), HasSubstr("failed: ")));
  // A dead device fails at every call, and another may be the first to find out.
  if (sticky || function == "execution") return;
  if (function == "launch") {
    EXPECT_THAT(ended.text, HasSubstr("kernel"));
  } else if (function == "ncclCommGetAsyncError") {
    EXPECT_THAT(ended.text, HasSubstr("(2)"));  // it tells of another call
  } else {
    EXPECT_THAT(ended.text, HasSubstr(function));
  }
}

TEST(StandInFailures, EveryDeclaredCallCanFailInTheStandIn) {
  std::set<std::string> declared;
  for (const char* header : {"cuda_runtime_api.h", "nccl.h"}) {
    std::ifstream in(std::string(BALLAST_SOURCE_DIR) + "/tests/standin/headers/" + header);
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    // "<type> <name>(", the name one of theirs.
    for (const std::string type : {"cudaError_t ", "ncclResult_t ", "const char* "}) {
      for (std::size_t at = text.find(type); at != std::string::npos; at = text.find(type, at + 1)) {
        const std::size_t begin = at + type.size();
        const std::size_t end = text.find_first_of("( ,;\n", begin);
        if (end == std::string::npos || text[end] != '(') continue;
        const std::string name = text.substr(begin, end - begin);
        if (name.starts_with("cuda") || name.starts_with("nccl")) declared.insert(name);
      }
    }
  }
  ASSERT_GT(declared.size(), 40u);
  for (const char* text :
       {"cudaGetErrorName", "cudaGetErrorString", "cudaGetLastError", "ncclGetErrorString", "ncclGetLastError"}) {
    EXPECT_EQ(declared.erase(text), 1u) << text;  // they report failures
  }
  declared.insert({"cuStreamWaitValue32", "launch", "execution"});
  const std::vector<std::string> listed = standin::functions();
  EXPECT_EQ(std::set<std::string>(listed.begin(), listed.end()), declared);
}

// --- one rank --------------------------------------------------------------------------------------------------------

TEST(StandInFailures, EachCallMayFailWhileOneRankTrains) {
  const TemporaryDirectory directory;
  std::size_t failures = 0;
  std::set<std::string> reached;
  const std::uint64_t parts = number_from("BALLAST_STANDIN_PLACES", test::kUnderThreadSanitizer ? 2 : 4);
  for (const Tier tier : {Tier::device, Tier::nvme}) {
    const Config config = plain_config(directory.path(), tier, Timing::just_in_time);
    const auto environment = [] {
      EngineEnvironment made;
      made.device = std::shared_ptr<offload::Device>(cuda::make_cuda_device());
      return made;
    };
    standin::reset();
    const Ended plain = train(config, environment, small_case());
    ASSERT_EQ(plain.text, "");
    const Calls in_all = all_calls();
    for (const auto& entry : in_all) {
      const std::string& function = entry.first;
      const std::uint64_t calls = entry.second;
      if (calls == 0) continue;
      reached.insert(function);
      if (races(function)) continue;
      const bool tells = !kGiveBack.contains(function) && !kMayFail.contains(function);
      for (const std::uint64_t nth : places(tells ? plain.calls.at(function) : calls, parts)) {
        for (const cudaError_t error : {cudaErrorIllegalAddress, cudaErrorMemoryAllocation, cudaErrorInvalidValue}) {
          if (error != cudaErrorIllegalAddress && function == "execution") continue;
          const Watchdog watchdog(60);
          SCOPED_TRACE(function + " fails at call " + std::to_string(nth) + " of " + std::to_string(calls) + " with " +
                       cudaGetErrorName(error) + ", tier " + std::string(to_string(tier)));
          standin::reset();
          standin::fail(function, nth, error);
          const Ended ended = train(config, environment, small_case());
          // How many calls there are varies a little with the timing.
          const bool came = ended.text != "" || ended.calls.at(function) >= nth;
          if (tells && came) expect_right(ended, function, error, error == cudaErrorIllegalAddress);
          if (ended.text.empty()) {
            EXPECT_EQ(ended.values, plain.values);
          }
          EXPECT_EQ(standin::live().total(), 0u) << to_string(standin::live());
          ++failures;
        }
      }
    }
  }
  EXPECT_GT(failures, 150u);
  // Whatever else the stand-in lists is called with several ranks, by giving up, or by no training run.
  for (const std::string& function : standin::functions()) {
    if (function.starts_with("nccl") || function == "cudaEventQuery" || kNotInTraining.contains(function)) continue;
    EXPECT_TRUE(reached.contains(function)) << function << " is never called: is it still needed?";
  }
}

// --- four ranks ------------------------------------------------------------------------------------------------------

constexpr int kRanks = 4;
constexpr auto kTimeout = test::kUnderThreadSanitizer ? 5s : 3s;

std::vector<Ended> train_ranks(const Config& config, bool with_control, const std::function<void()>& inject,
                               std::size_t* warnings = nullptr) {
  standin::reset();
  standin::configure({.devices = kRanks});
  inject();
  std::vector<Ended> all(kRanks);
  std::atomic<std::size_t> told{0};
  std::vector<std::byte> id;
  try {
    id = make_nccl_id();
  } catch (const Error& error) {
    for (Ended& ended : all) ended = {kind_of(error), error.what(), {}, {}};
    return all;
  }
  on_ranks(kRanks, [&](int rank, const std::shared_ptr<Communicator>& communicator) {
    all[static_cast<std::size_t>(rank)] = train(
        config,
        [&] {
          try {
            EngineEnvironment made =
                gpu_rank(rank, kRanks, id, with_control ? communicator : nullptr, std::chrono::milliseconds(kTimeout));
            made.log = [&](LogLevel level, std::string_view text) {
              told += level == LogLevel::warning && text.find("ncclCommRegister") != std::string_view::npos;
            };
            return made;
          } catch (const Error& error) {
            communicator->abort(error.what());  // as any program must that leaves the others
            throw;
          }
        },
        of_rank(small_case(), rank, kRanks));
  });
  if (warnings != nullptr) *warnings = told;
  return all;
}

TEST(StandInFailures, EachCallMayFailWhileFourRanksTrain) {
  const TemporaryDirectory directory;
  Config config = plain_config(directory.path(), Tier::host, Timing::just_in_time);
  const std::uint64_t parts = number_from("BALLAST_STANDIN_PLACES", test::kUnderThreadSanitizer ? 1 : 2);
  std::size_t failures = 0;
  std::set<std::string> reached;
  for (const bool with_control : {true, false}) {
    const std::vector<Ended> plain = train_ranks(config, with_control, [] {});
    for (const Ended& ended : plain) ASSERT_EQ(ended.text, "");
    const Calls in_all = all_calls();
    for (const auto& entry : in_all) {
      const std::string& function = entry.first;
      const std::uint64_t calls = entry.second;
      if (calls == 0) continue;
      reached.insert(function);
      if (races(function)) continue;
      const bool tells = !kGiveBack.contains(function) && !kMayFail.contains(function);
      std::uint64_t before_end = calls;
      for (const Ended& ended : plain) before_end = std::min(before_end, ended.calls.at(function));
      // Watchdogs ask by the clock, and go on asking when training has ended.
      const bool by_clock = function == "cudaEventQuery" || function == "ncclCommGetAsyncError";
      const std::uint64_t among = by_clock ? 1 : tells ? before_end : calls;
      for (const std::uint64_t nth : places(among, parts)) {
        // Both kinds of error by turns; NCCL reports by numbers of its own.
        const bool sticky = function == "execution" || (failures % 3 == 0 && !function.starts_with("nccl"));
        const cudaError_t error = sticky ? cudaErrorIllegalAddress : cudaErrorInvalidValue;
        const Watchdog watchdog(90);
        SCOPED_TRACE(function + " fails at call " + std::to_string(nth) + " of " + std::to_string(calls) + " with " +
                     cudaGetErrorName(error) + (with_control ? ", with" : ", without") + " control");
        const std::vector<Ended> all = train_ranks(config, with_control, [&] { standin::fail(function, nth, error); });
        EXPECT_EQ(standin::live().total(), 0u) << to_string(standin::live());
        ++failures;
        const auto failed = std::count_if(all.begin(), all.end(), [](const Ended& e) { return !e.text.empty(); });
        if (failed == 0) {
          for (std::size_t r = 0; r < all.size(); ++r) EXPECT_EQ(all[r].values, plain[r].values);
        }
        if (!tells) continue;
        if (failed == 0) {
          EXPECT_LT(standin::calls(function), nth + calls / 4) << "nothing was thrown";
          continue;
        }
        // Who had its numbers before a late failure has them; nobody takes no notice of an early one.
        if (nth == 1) {
          EXPECT_EQ(failed, kRanks) << "some rank took no notice";
        }
        // One tells of the call, the others of that rank or of what they waited for.
        const Ended* best = nullptr;
        std::string texts;
        int best_score = -1;
        for (const Ended& ended : all) {
          if (ended.text.empty()) continue;
          const auto has = [&](const std::string& what) { return ended.text.find(what) != std::string::npos; };
          const int score = 4 * has(function) + 2 * (has("cudaError") || has("failed: ")) + !has("gave up");
          if (score > best_score) best = &ended;
          best_score = std::max(best_score, score);
          texts += "\n  " + ended.kind + ": " + ended.text;
        }
        ASSERT_NE(best, nullptr);
        SCOPED_TRACE("the ranks' errors:" + texts);
        expect_right(*best, function, error, sticky);
      }
    }
  }
  EXPECT_GT(failures, 50u);
  for (const std::string& function : standin::functions()) {
    if (kNotInTraining.contains(function) || function == "ncclCommAbort" || function == "ncclReduceScatter") continue;
    if (function == "cudaMemsetAsync" || function == "cudaStreamWaitEvent" || function == "ncclAllReduce") continue;
    EXPECT_TRUE(reached.contains(function)) << function << " is never called by four ranks";
  }
}

TEST(StandInFailures, MemoryThatNcclWillNotRegisterIsToldOnceAndChangesNothing) {
  const TemporaryDirectory directory;
  const Config config = plain_config(directory.path(), Tier::host, Timing::just_in_time);
  const std::vector<Ended> plain = train_ranks(config, true, [] {});
  EXPECT_EQ(standin::calls("ncclCommRegister"), 2u * kRanks);  // for gathers and for reductions
  EXPECT_EQ(standin::calls("ncclCommDeregister"), 2u * kRanks);
  std::size_t warnings = 0;
  const std::vector<Ended> found = train_ranks(
      config, true,
      [] {
        for (int call = 1; call <= 2 * kRanks; ++call) {
          standin::fail("ncclCommRegister", static_cast<std::uint64_t>(call), cudaErrorInvalidValue);
        }
      },
      &warnings);
  for (std::size_t r = 0; r < found.size(); ++r) {
    EXPECT_EQ(found[r].text, "");
    EXPECT_EQ(found[r].values, plain[r].values);
  }
  EXPECT_EQ(warnings, static_cast<std::size_t>(kRanks));  // once a rank
  EXPECT_EQ(standin::calls("ncclCommDeregister"), 0u);
  EXPECT_EQ(standin::live().total(), 0u) << to_string(standin::live());
}

}  // namespace
}  // namespace ballast
