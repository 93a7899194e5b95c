// What a run says of itself: the sentence on what limited it, the report, the trace.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "command_runner.h"

namespace ballast::testing {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using Arguments = std::vector<std::string>;
using Json = nlohmann::json;

class Explained : public ::testing::Test {
 protected:
  std::string file(const std::string& name) const { return scratch_.path() + "/" + name; }
  Arguments with(const Arguments& first, const std::string& engine, const Arguments& more) const {
    Arguments all = first;
    for (const std::string& each :
         Arguments{"--model", source_path("configs/models/gpt-tiny.json"), "--engine",
                   source_path("configs/engine/" + engine + ".json"), "--set", "nvme.paths=" + file("states"), "--json",
                   file("json"), "--report", file("report")})
      all.push_back(each);
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  Arguments train(const std::string& engine, const Arguments& more) const {
    return with({"train", "--data", data_, "--sequence", "16", "--batch", "1"}, engine, more);
  }
  void run(const Arguments& arguments) {
    const CommandResult result = run_command(arguments);
    ASSERT_EQ(result.status, 0) << result.error;
    output_ = result.output;
    json_ = Json::parse(read_file(file("json")), nullptr, false);
    const std::string page = read_file(file("report"));
    const std::string open = "<script type=\"application/json\" id=\"data\">";
    const std::size_t begin = page.find(open);
    ASSERT_NE(begin, std::string::npos);
    data_of_page_ = Json::parse(page.substr(begin + open.size(), page.find("</script>", begin) - begin - open.size()),
                                nullptr, false);
    ASSERT_FALSE(json_.is_discarded() || data_of_page_.is_discarded());
  }
  // Bytes of a lane's spans that ended after the warm-up.
  double steady_bytes(int lane) const {
    const Json& spans = data_of_page_["spans"];
    double sum = 0;
    for (std::size_t i = 0; i < spans["lane"].size(); ++i) {
      if (spans["lane"][i] != lane) continue;
      const double end = spans["begin_ns"][i].get<double>() + spans["duration_ns"][i].get<double>();
      if (end >= data_of_page_["steady_begin_ns"].get<double>()) sum += spans["bytes"][i].get<double>();
    }
    return sum;
  }

  ScratchFolder scratch_;
  std::string data_ = [&] {
    std::string text;
    for (int i = 0; i < 400; ++i) text += "line " + std::to_string(i * 7919) + " of the text\n";
    return scratch_.write("text", text);
  }();
  std::string output_;
  Json json_, data_of_page_;
};

TEST_F(Explained, TheReportsSpansAddUpToTheFiguresOfJson) {
  run(train("nvme", {"--steps", "5"}));
  EXPECT_EQ(data_of_page_["complete_from_ns"], 0);  // nothing has fallen out
  EXPECT_EQ(data_of_page_["figures"], json_);
  EXPECT_EQ(data_of_page_["steps"].size(), 5u);
  const double steady_steps = 3;  // all but the first two
  const Json& bytes = json_["bytes_per_step"];
  // Means are rounded to whole bytes.
  EXPECT_NEAR(steady_bytes(0) / steady_steps, bytes["nvme_read"].get<double>(), 0.5);
  EXPECT_NEAR(steady_bytes(1) / steady_steps, bytes["nvme_written"].get<double>(), 0.5);
  EXPECT_NEAR(steady_bytes(2) / steady_steps, bytes["host_to_device"].get<double>(), 0.5);
  EXPECT_NEAR(steady_bytes(3) / steady_steps, bytes["device_to_host"].get<double>(), 0.5);
  EXPECT_GT(steady_bytes(0), 0);
  for (const char* tier : {"device", "host"}) {
    EXPECT_EQ(data_of_page_["memory"][tier]["peak"], json_["peak_bytes"][tier]);
    EXPECT_EQ(data_of_page_["memory"][tier]["budget"], json_["budget_bytes"][tier]);
  }
}

TEST_F(Explained, EveryRunEndsWithTheSentenceThatJsonHolds) {
  for (const Arguments& arguments : {train("nvme", {"--steps", "1"}), train("host", {"--steps", "3"}),
                                     with({"bench", "step", "--steps", "3"}, "nvme", {}),
                                     with({"bench", "step", "--steps", "1"}, "in-memory", {})}) {
    run(arguments);
    const std::string sentence = json_["limit"]["sentence"];
    EXPECT_THAT(output_, EndsWith(sentence + ".\n"));
    EXPECT_THAT(sentence, HasSubstr(" % of a step ("));
    EXPECT_GT(json_["limit"]["busy_seconds"]["compute"], 0);
    EXPECT_TRUE(json_["limit"]["compute_seen"]);
    EXPECT_LE(json_["limit"]["share"], 1.0);
  }
}

TEST_F(Explained, ARunWithNothingLeftToDoSaysThatNothingCanBeTold) {
  const Arguments more = {"--steps", "2", "--checkpoint", file("saves")};
  run(train("host", more));
  Arguments again = more;
  again.push_back("--resume");
  run(train("host", again));
  EXPECT_EQ(json_["limit"]["steps"], 0);
  EXPECT_TRUE(json_["limit"]["lane"].is_null());
  EXPECT_TRUE(data_of_page_["steps"].empty());
}

// The Trace Event format: complete events ("X") with ts and dur in microseconds; slices of one thread nest or follow
// one another; metadata ("M") names process and threads.
TEST_F(Explained, TheTraceKeepsTheRulesOfTheTraceEventFormat) {
  run(train("nvme", {"--steps", "3", "--trace", file("trace")}));
  const Json trace = Json::parse(read_file(file("trace")), nullptr, false);
  ASSERT_FALSE(trace.is_discarded());
  std::map<int, std::string> names;
  std::map<int, double> ends;
  std::set<std::string> lanes;
  std::size_t slices = 0;
  for (const Json& event : trace.at("traceEvents")) {
    ASSERT_TRUE(event.at("name").is_string());
    ASSERT_TRUE(event.at("pid").is_number_integer());
    if (event.at("ph") == "M") {
      if (event.at("name") == "thread_name") names[event.at("tid")] = event.at("args").at("name");
      continue;
    }
    ASSERT_EQ(event.at("ph"), "X");
    ++slices;
    const int thread = event.at("tid");
    const double begin = event.at("ts"), duration = event.at("dur");
    EXPECT_GE(begin, 0);
    EXPECT_GE(duration, 0);
    EXPECT_GE(begin, ends[thread] - 1e-3);  // a nanosecond
    ends[thread] = begin + duration;
    EXPECT_TRUE(event.at("args").at("bytes").is_number_unsigned());
    lanes.insert(event.at("cat"));
  }
  EXPECT_GT(slices, 0u);
  for (const auto& [thread, end] : ends) EXPECT_TRUE(names.contains(thread)) << thread;
  for (const char* lane : {"nvme read", "nvme write", "host to device", "device to host", "compute", "cpu"})
    EXPECT_TRUE(lanes.contains(lane)) << lane;
}

}  // namespace
}  // namespace ballast::testing
