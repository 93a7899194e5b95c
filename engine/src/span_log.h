// SpanLog: what ran when, for a timeline. A ring of fixed size; the oldest spans fall out. Not thread-safe: its owner
// guards it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/timeline.h>

#include <cstdint>
#include <string>
#include <vector>

namespace ballast::engine {

class SpanLog {
 public:
  explicit SpanLog(std::size_t capacity = 1u << 15) : spans_(capacity) {}
  void add(const Span& span) {
    spans_[next_ % spans_.size()] = span;
    ++next_;
  }
  // Oldest first.
  template <class Visit>
  void visit(const Visit& visit) const {
    const std::uint64_t first = next_ > spans_.size() ? next_ - spans_.size() : 0;
    for (std::uint64_t i = first; i < next_; ++i) visit(spans_[i % spans_.size()]);
  }

  // None that ended after this has fallen out.
  std::uint64_t complete_from_ns() const { return next_ > spans_.size() ? spans_[next_ % spans_.size()].end_ns : 0; }

 private:
  std::vector<Span> spans_;
  std::uint64_t next_ = 0;
};

// Writes the trace-event JSON that Perfetto and chrome://tracing open. Throws IoError.
void write_trace_file(const std::string& path, const Timeline& timeline);

}  // namespace ballast::engine
