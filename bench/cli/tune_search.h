// Which block size and queue depth a drive is fastest with: from coarse to fine, as few measurements as the answer
// needs. Pure: measuring is the caller's. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace ballast::cli {

struct TunePoint {
  std::uint64_t block_bytes = 0;
  std::uint32_t queue_depth = 0;
  bool operator==(const TunePoint&) const = default;
  std::uint64_t bytes_in_flight() const { return block_bytes * queue_depth; }
};

struct TuneSamples {
  TunePoint point;
  std::vector<double> rates;  // bytes per second, in the order measured
  double median() const;
  // Half of the range of the samples over their median; 1 (nothing is known) where there are fewer than three.
  double spread() const;
};

struct TuneSpace {
  // Powers of two from the least to the most, both included.
  std::uint64_t block_bytes_least = std::uint64_t{64} << 10, block_bytes_most = std::uint64_t{8} << 20;
  std::uint32_t depth_least = 1, depth_most = 128;
  std::uint64_t in_flight_bytes_most = std::uint64_t{128} << 20;  // block times depth
  std::vector<TunePoint> points() const;
};

struct TuneChoice {
  TunePoint point;
  std::vector<TuneSamples> measured;  // by what was measured first
  // The best and all that are as good as far as the samples tell; the choice is the one with the least bytes in flight.
  std::vector<TunePoint> as_good;
  bool clear = false;  // the samples settled it; false: time or rounds ended first
  const TuneSamples& chosen() const;
};

// Bytes per second of what a step moves, 14 bytes read for 12 written: 24 of the 26 go both ways at once, and the 2
// that are read alone go at the rate of reading.
double step_mix_rate(double mixed_bytes_per_second, double read_bytes_per_second);

// What one path gains by doing both at once: the time of as many bytes each way one after the other over that of both
// together. 1: they share the drive; 2: neither slows the other; below 1: mixing costs.
double duplex_factor(double read_rate, double write_rate, double mixed_rate);

// `measure` gives one sample, in bytes per second; `time_left` is asked between samples. First a coarse grid, then the
// neighbours of the best until none is better, then the best few in turn, as a drive's rate drifts, until one is ahead
// by more than the samples scatter or the rest is within 1 %.
TuneChoice tune(const TuneSpace& space, const std::function<double(const TunePoint&)>& measure,
                const std::function<bool()>& time_left);

}  // namespace ballast::cli
