// A search over powers of two.
// SPDX-License-Identifier: Apache-2.0
#include "tune_search.h"

#include <ballast/base/check.h>

#include <algorithm>

namespace ballast::cli {
namespace {

constexpr double kContender = 0.90;  // of the best one's rate: worth measuring again
constexpr double kAsGood = 0.99;
constexpr std::size_t kContenders = 6, kSamplesLeast = 3, kSamplesMost = 9;

double middle(std::vector<double> values) {
  BALLAST_CHECK(!values.empty());
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

class Search {
 public:
  Search(const TuneSpace& space, const std::function<double(const TunePoint&)>& measure,
         const std::function<bool()>& time_left)
      : points_(space.points()), measure_(measure), time_left_(time_left) {}

  TuneChoice run() {
    coarse();
    climb();
    const bool clear = settle();
    TuneChoice choice;
    const double top = best().median();
    for (const TuneSamples& each : measured_)
      if (each.median() >= kAsGood * top && each.rates.size() >= best().rates.size())
        choice.as_good.push_back(each.point);
    choice.point = *std::min_element(choice.as_good.begin(), choice.as_good.end(), [](const auto& a, const auto& b) {
      return a.bytes_in_flight() < b.bytes_in_flight();
    });
    choice.clear = clear;
    choice.measured = std::move(measured_);
    return choice;
  }

 private:
  bool inside(const TunePoint& point) const {
    return std::find(points_.begin(), points_.end(), point) != points_.end();
  }
  TuneSamples& samples(const TunePoint& point) {
    const auto found =
        std::find_if(measured_.begin(), measured_.end(), [&](const TuneSamples& each) { return each.point == point; });
    return found != measured_.end() ? *found : measured_.emplace_back(TuneSamples{point, {}});
  }
  // The first sample is taken whatever the time is: something has to be chosen.
  bool sample(const TunePoint& point) {
    if (!measured_.empty() && !time_left_()) return false;
    const double rate = measure_(point);
    samples(point).rates.push_back(rate);
    return true;
  }
  const TuneSamples& best() const {
    return *std::max_element(measured_.begin(), measured_.end(),
                             [](const auto& a, const auto& b) { return a.median() < b.median(); });
  }

  // Every fourth power of two each way.
  void coarse() {
    const TunePoint least = points_.front();
    for (const TunePoint& point : points_) {
      const auto every_other_pair = [](std::uint64_t ratio) {
        for (; ratio >= 4; ratio /= 4) {
        }
        return ratio == 1;
      };
      if (!every_other_pair(point.block_bytes / least.block_bytes)) continue;
      if (!every_other_pair(point.queue_depth / least.queue_depth)) continue;
      if (!sample(point)) return;
    }
  }
  void climb() {
    for (bool moved = true; moved;) {
      moved = false;
      const TunePoint from = best().point;
      const TunePoint around[] = {
          {from.block_bytes * 2, from.queue_depth},     {from.block_bytes / 2, from.queue_depth},
          {from.block_bytes, from.queue_depth * 2},     {from.block_bytes, from.queue_depth / 2},
          {from.block_bytes * 2, from.queue_depth / 2}, {from.block_bytes / 2, from.queue_depth * 2}};
      for (const TunePoint& point : around) {
        if (!inside(point) || !samples_of(point).empty()) continue;
        if (!sample(point)) return;
      }
      moved = best().point != from;
    }
  }
  std::vector<double> samples_of(const TunePoint& point) const {
    for (const TuneSamples& each : measured_)
      if (each.point == point) return each.rates;
    return {};
  }
  // Those still in the race, the best first.
  std::vector<TunePoint> contenders() const {
    std::vector<const TuneSamples*> order;
    const double top = best().median();
    for (const TuneSamples& each : measured_) {
      // Out: behind by more than both scatter. One sample says little, so a wide margin counts then.
      const double doubt = each.rates.size() < kSamplesLeast ? 1 - kContender : each.spread() + best().spread();
      if (each.median() >= top * std::max(kContender, 1 - doubt)) order.push_back(&each);
    }
    std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) { return a->median() > b->median(); });
    if (order.size() > kContenders) order.resize(kContenders);
    std::vector<TunePoint> points;
    for (const TuneSamples* each : order) points.push_back(each->point);
    return points;
  }
  bool settle() {
    for (std::size_t round = 2; round <= kSamplesMost; ++round) {
      const std::vector<TunePoint> racing = contenders();
      if (round > kSamplesLeast) {
        const double top = best().median();
        const bool equal = std::all_of(racing.begin(), racing.end(), [&](const TunePoint& point) {
          return middle(samples_of(point)) >= kAsGood * top;
        });
        if (racing.size() == 1 || equal) return true;
      }
      for (const TunePoint& point : racing)
        if (samples_of(point).size() < round && !sample(point)) return false;
    }
    return contenders().size() == 1;
  }

  std::vector<TunePoint> points_;
  const std::function<double(const TunePoint&)>& measure_;
  const std::function<bool()>& time_left_;
  std::vector<TuneSamples> measured_;
};

}  // namespace

double TuneSamples::median() const { return middle(rates); }

double TuneSamples::spread() const {
  if (rates.size() < kSamplesLeast) return 1;
  const auto [low, high] = std::minmax_element(rates.begin(), rates.end());
  return (*high - *low) / 2 / median();
}

std::vector<TunePoint> TuneSpace::points() const {
  std::vector<TunePoint> points;
  for (std::uint64_t block = block_bytes_least; block <= block_bytes_most; block *= 2)
    for (std::uint32_t depth = depth_least; depth <= depth_most; depth *= 2)
      if (block * depth <= in_flight_bytes_most) points.push_back({block, depth});
  return points;
}

const TuneSamples& TuneChoice::chosen() const {
  return *std::find_if(measured.begin(), measured.end(), [&](const auto& each) { return each.point == point; });
}

double step_mix_rate(double mixed, double read) { return 26 / (24 / mixed + 2 / read); }

double duplex_factor(double read, double write, double mixed) { return mixed * (1 / read + 1 / write) / 2; }

TuneChoice tune(const TuneSpace& space, const std::function<double(const TunePoint&)>& measure,
                const std::function<bool()>& time_left) {
  return Search(space, measure, time_left).run();
}

}  // namespace ballast::cli
