// What the engine's tests share: configurations by a few words, and one unit's step by hand.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <functional>
#include <string>
#include <vector>

#include "synthetic_trainer.h"

namespace ballast::testing {

// What that kind of error says.
template <class Error>
std::string text_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

inline Config plain_config(const std::string& directory, Tier tier, Timing timing) {
  Config config;
  config.device = "host";
  config.budget.device_bytes = std::uint64_t{64} << 20;
  config.budget.host_bytes = std::uint64_t{64} << 20;
  config.nvme.paths = {directory + "/nvme"};
  config.placement.automatic = false;
  config.placement.parameters = tier;
  config.placement.optimizer = tier;
  config.placement.gradients = tier == Tier::device ? Tier::device : Tier::host;
  config.optimizer.timing = timing;
  config.optimizer.clip_global_norm.reset();
  config.threads = 2;
  return config;
}

// Ends the process where a test stands still: a hang must fail, not wait.
class Watchdog {
 public:
  explicit Watchdog(unsigned seconds = 100) { ::alarm(seconds); }
  ~Watchdog() { ::alarm(0); }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
};

inline void fill_gradient(const Tensor& out, float value) {
  for (std::int64_t i = 0; i < out.elements; ++i) {
    if (out.dtype == DataType::fp32) {
      static_cast<float*>(out.data)[i] = value;
    } else {
      static_cast<std::uint16_t*>(out.data)[i] = bf16_bits(value);
    }
  }
}

inline float read_one(Engine& engine, ParameterId id, std::int64_t element = 0) {
  float value = 0;
  engine.read(id, element, {&value, 1});
  return value;
}

// One contribution: every parameter of the unit that is trainable gets value(index).
inline void contribute(Engine& engine, UnitId unit, const std::vector<ParameterSpec>& parameters,
                       const std::function<float(std::uint32_t)>& value, bool partial = false) {
  Stream stream = engine.stream();
  auto lease = engine.acquire(unit, stream);
  auto gradients = engine.gradients(unit, stream);
  for (std::uint32_t p = 0; p < parameters.size(); ++p) {
    if (!parameters[p].options.trainable) continue;
    const Tensor out = gradients[{unit.index, p}];
    stream.enqueue([out, v = value(p)] { fill_gradient(out, v); });
  }
  if (partial) {
    gradients.commit_partial(stream);
  } else {
    gradients.commit(stream);
  }
  lease.release(stream);
}

}  // namespace ballast::testing
