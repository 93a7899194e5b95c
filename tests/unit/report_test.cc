// What limits a step, from spans made up for it; and the page that shows a run.
// SPDX-License-Identifier: Apache-2.0
#include "report/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <regex>

namespace ballast::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

constexpr std::uint64_t kMs = 1'000'000;

Span span(Lane lane, std::uint64_t begin_ms, std::uint64_t end_ms, std::uint64_t bytes = 0) {
  return {lane, "task", 0, 0, begin_ms * kMs, end_ms * kMs, bytes};
}
TimeWindow window(std::uint64_t begin_ms, std::uint64_t end_ms) { return {begin_ms * kMs, end_ms * kMs}; }

StepLimit limit_of_spans(std::vector<Span> spans, const std::vector<TimeWindow>& steps,
                         std::uint64_t complete_from_ms = 0) {
  return limit_of({std::move(spans), {"h.0"}, complete_from_ms * kMs}, steps);
}

TEST(StepLimitTest, WritesThatComputeDoesNotCoverAreNamedWithTheirShareAndWhatIsNotHidden) {
  // One step of 1 s: writes 100..900 as two that overlap, compute 0..300: 600 of the 800 are open.
  const StepLimit limit = limit_of_spans({span(Lane::nvme_write, 100, 700), span(Lane::nvme_write, 500, 900),
                                          span(Lane::compute, 0, 300), span(Lane::nvme_read, 0, 200)},
                                         {window(0, 1000)});
  EXPECT_EQ(limit.lane, Lane::nvme_write);
  EXPECT_DOUBLE_EQ(limit.share(Lane::nvme_write), 0.8);
  EXPECT_DOUBLE_EQ(limit.not_hidden_seconds[static_cast<std::size_t>(Lane::nvme_write)], 0.6);
  EXPECT_DOUBLE_EQ(limit.not_hidden_seconds[static_cast<std::size_t>(Lane::nvme_read)], 0.0);
  EXPECT_DOUBLE_EQ(limit.compute_idle_seconds, 0.7);
  EXPECT_EQ(to_sentence(limit), "NVMe writes 80 % of a step (1.00 s), of which 0.60 s not hidden");
}

TEST(StepLimitTest, EachLaneCanBeTheOneThatLimits) {
  const char* const subjects[] = {
      "NVMe reads",  "NVMe writes", "Copies from host to device", "Copies from device to host",
      "Collectives", "Compute",     "Updates on the CPU"};
  for (int i = 0; i < kLaneCount; ++i) {
    std::vector<Span> spans = {span(Lane::compute, 0, 100)};
    spans.push_back(span(static_cast<Lane>(i), 50, 950));
    const StepLimit limit = limit_of_spans(spans, {window(0, 1000)});
    EXPECT_EQ(limit.lane, static_cast<Lane>(i));
    EXPECT_THAT(to_sentence(limit), ::testing::StartsWith(subjects[i]));
  }
}

TEST(StepLimitTest, WhatComputeCoversWhollyIsSaidToBeHidden) {
  const StepLimit limit = limit_of_spans(
      {span(Lane::compute, 0, 400), span(Lane::compute, 500, 900), span(Lane::cpu, 0, 400), span(Lane::cpu, 450, 900)},
      {window(0, 900)});
  EXPECT_EQ(limit.lane, Lane::cpu);  // 850 ms against 800
  EXPECT_EQ(to_sentence(limit), "Updates on the CPU 94 % of a step (0.90 s), of which 50.0 ms not hidden");
  const StepLimit hidden = limit_of_spans({span(Lane::compute, 0, 896), span(Lane::cpu, 1, 898)}, {window(0, 1000)});
  EXPECT_EQ(to_sentence(hidden), "Updates on the CPU 90 % of a step (1.00 s), all of it hidden behind compute");
}

TEST(StepLimitTest, ComputeThatLimitsIsSaidToHaveWaitedOrNot) {
  const StepLimit waited =
      limit_of_spans({span(Lane::compute, 0, 900), span(Lane::nvme_read, 850, 980)}, {window(0, 1000)});
  EXPECT_EQ(to_sentence(waited),
            "Compute 90 % of a step (1.00 s), which stood still for 0.10 s, 80.0 ms of it beside NVMe reads");
  const StepLimit never = limit_of_spans({span(Lane::compute, 0, 1000)}, {window(0, 1000)});
  EXPECT_EQ(to_sentence(never), "Compute 100 % of a step (1.00 s), which never waited");
  // Of equal ones it is compute.
  const StepLimit equal =
      limit_of_spans({span(Lane::compute, 0, 500), span(Lane::nvme_read, 0, 500)}, {window(0, 500)});
  EXPECT_EQ(equal.lane, Lane::compute);
}

TEST(StepLimitTest, SecondsAreOfAMeanStepAndSpansAreCutToTheSteps) {
  // Between the steps, 1000..2000, the drive works too: that does not count.
  const StepLimit limit = limit_of_spans({span(Lane::nvme_read, 500, 2500), span(Lane::compute, 0, 100)},
                                         {window(0, 1000), window(2000, 3000)});
  EXPECT_EQ(limit.steps, 2u);
  EXPECT_DOUBLE_EQ(limit.step_seconds, 1.0);
  EXPECT_DOUBLE_EQ(limit.busy_seconds[static_cast<std::size_t>(Lane::nvme_read)], 0.5);
  EXPECT_DOUBLE_EQ(limit.busy_seconds[static_cast<std::size_t>(Lane::compute)], 0.05);
}

TEST(StepLimitTest, StepsThatTheLogHasLostInPartAreLeftOut) {
  const std::vector<TimeWindow> steps = {window(0, 1000), window(1000, 2000)};
  const std::vector<Span> spans = {span(Lane::nvme_read, 900, 2000), span(Lane::compute, 1000, 1500)};
  EXPECT_EQ(limit_of_spans(spans, steps, 950).steps, 1u);
  EXPECT_DOUBLE_EQ(limit_of_spans(spans, steps, 950).share(Lane::nvme_read), 1.0);
  EXPECT_EQ(limit_of_spans(spans, steps, 1500).steps, 0u);
  EXPECT_THAT(to_sentence(limit_of_spans(spans, steps, 1500)), HasSubstr("cannot be told"));
}

TEST(StepLimitTest, WithoutStepsSpansOrComputeItSaysSo) {
  EXPECT_EQ(to_sentence(limit_of_spans({}, {})), "What limits a step cannot be told: none was measured whole");
  EXPECT_EQ(to_sentence(limit_of_spans({}, {window(0, 10)})),
            "Nothing limits a step: no lane had work in those measured");
  EXPECT_EQ(to_sentence(limit_of_spans({span(Lane::host_to_device, 0, 500)}, {window(0, 1000)})),
            "Copies from host to device 50 % of a step (1.00 s); what of it is hidden cannot be told, as the device's "
            "compute is not seen");
}

RunReport example() {
  RunReport run;
  run.title = "ballast train, gpt.json";
  run.figures["parameters"] = 1000;
  run.figures["world_size"] = 1;
  run.figures["bytes_per_step"] = {{"nvme_read", 14000}, {"nvme_written", 12000}};
  run.figures["configuration"] = {{"zero_stage", 3}};
  run.engine.budget_host_bytes = 1 << 20;
  run.engine.host_memory = {{"gradients", 4096}};
  run.timeline = {{span(Lane::nvme_read, 1600, 1700, 14000), span(Lane::nvme_write, 1500, 1900, 12000),
                   span(Lane::compute, 1000, 1500)},
                  {"h.0"},
                  0};
  run.steps = run.timed = {window(1000, 2000)};
  run.limit = limit_of(run.timeline, run.timed);
  return run;
}

// The text between the script element's tags; the page holds one of that kind.
Json data_in(const std::string& page) {
  const std::string open = "<script type=\"application/json\" id=\"data\">";
  const std::size_t begin = page.find(open) + open.size();
  return Json::parse(page.substr(begin, page.find("</script>", begin) - begin), nullptr, false);
}

TEST(ReportPage, NeedsNothingFromElsewhere) {
  const std::string page = report_page(example());
  for (const char* reach : {"http:", "https:", "//www", "@import", "url(", " src=", " href=", "<link", "<iframe",
                            "fetch(", "XMLHttpRequest", "WebSocket", "import("})
    EXPECT_THAT(page, Not(HasSubstr(reach)));
  EXPECT_THAT(page, HasSubstr("default-src 'none'"));
  EXPECT_THAT(page, Not(HasSubstr("{{")));
}

TEST(ReportPage, TheDataInItHoldEverySpanInOrderOfItsBeginning) {
  const Json data = data_in(report_page(example()));
  ASSERT_FALSE(data.is_discarded());
  EXPECT_EQ(data["spans"]["lane"], Json({5, 1, 0}));
  EXPECT_EQ(data["spans"]["begin_ns"], Json({0, 500 * kMs, 600 * kMs}));
  EXPECT_EQ(data["spans"]["duration_ns"], Json({500 * kMs, 400 * kMs, 100 * kMs}));
  EXPECT_EQ(data["spans"]["bytes"], Json({0, 12000, 14000}));
  EXPECT_EQ(data["steps"], Json::parse("[[0, 1000000000]]"));
  EXPECT_EQ(data["limit"]["lane"], "compute");  // 500 ms against 400
  EXPECT_EQ(data["memory"]["host"]["budget"], 1 << 20);
}

TEST(ReportPage, WhatAUserMayNameIsTextAndNothingElse) {
  const std::string evil = "</script><script>alert(1)</script><img src=x onerror=\"alert('2')\">&<!--{{data}}\xff";
  RunReport run = example();
  run.title = evil;
  run.figures["model"] = evil;
  run.figures["configuration"] = {{"nvme", {{"paths", {evil}}}}};
  run.timeline.unit_names = {evil};
  run.engine.host_memory = {{evil, 1}};
  const std::string page = report_page(run);
  EXPECT_THAT(page, Not(HasSubstr("<script>alert")));
  EXPECT_THAT(page, Not(HasSubstr("<img")));
  const std::string open = "<script", end = "</script>";
  const auto count = [&](const std::string& what) {
    std::size_t found = 0;
    for (std::size_t at = page.find(what); at != std::string::npos; at = page.find(what, at + 1)) ++found;
    return found;
  };
  EXPECT_EQ(count(open), 2u);
  EXPECT_EQ(count(end), 2u);
  const Json data = data_in(page);
  ASSERT_FALSE(data.is_discarded());
  const std::string kept = evil.substr(0, evil.size() - 1) + "\xEF\xBF\xBD";  // the byte that is no UTF-8, replaced
  EXPECT_EQ(data["figures"]["model"], kept);
  EXPECT_EQ(data["units"][0], kept);
  EXPECT_THAT(page, HasSubstr("<title>&lt;/script&gt;"));
}

TEST(ReportPage, StandsWithoutAStepAndWithoutASpan) {
  RunReport run;
  run.title = "nothing";
  run.figures["parameters"] = 0;
  const std::string page = report_page(run);
  const Json data = data_in(page);
  ASSERT_FALSE(data.is_discarded());
  EXPECT_TRUE(data["steps"].empty());
  EXPECT_TRUE(data["spans"]["lane"].empty());
  EXPECT_THAT(page, HasSubstr("cannot be told"));
}

}  // namespace
}  // namespace ballast::cli
