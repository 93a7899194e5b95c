// A pass as it was seen (or is expected), with its compiled places and forms. And the recorder that sees it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "plan.h"

namespace ballast::engine {

struct Trace {
  std::vector<TraceOpening> openings;
  // Compiled, one per opening:
  std::vector<std::uint64_t> offsets;          // in the device window
  std::vector<std::uint8_t> first_parameters;  // the unit's first acquire of the pass
  std::vector<std::uint8_t> carries_update;    // eager: states are read with these parameters
  std::vector<std::uint8_t> queues_update;     // eager: this gradient queues the update itself
  std::size_t forward_end = 0;                 // first opening that must not be appended before the step is decided
};

// Places and forms of a pass. False where it does not fit the window: such a pass is served on demand.
bool compile_trace(const Plan& plan, std::uint64_t gradient_element_bytes, Trace& trace);

// The order expected before any pass was seen: units as registered, then reversed with their gradients.
std::vector<TraceOpening> default_openings(const std::vector<bool>& unit_trainable);

// Watches one pass.
class TraceRecorder {
 public:
  void begin();
  // Returns the opening's number, for close().
  std::uint32_t open(std::uint32_t unit, bool gradient);
  void close(std::uint32_t opening, bool last = false);
  // Closes what is still open and gives the pass.
  const std::vector<TraceOpening>& end();

 private:
  std::vector<TraceOpening> openings_;
  std::uint32_t events_ = 0;
};

bool same_openings(const std::vector<TraceOpening>& a, const std::vector<TraceOpening>& b);

}  // namespace ballast::engine
