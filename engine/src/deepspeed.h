// A DeepSpeed configuration read as one of ours. Behind Config::from_json.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/deepspeed.h>

#include <span>
#include <string>
#include <string_view>

#include "json_value.h"

namespace ballast::deepspeed {

// Told by its keys, of which a configuration of ours has none. Throws ConfigError for a mixture of both.
bool recognised(const json::Value& root);

// The configuration of ours that means the same, each value standing where DeepSpeed's stood; fills in `file`. Throws
// ConfigError for what would change the numbers and cannot be honoured.
json::Value translate(const json::Value& root, DeepSpeedFile* file);

// A key that means nothing here, and why; of its values none changes the numbers.
struct Meaningless {
  std::string_view key;  // dotted
  std::string_view why;
};
std::span<const Meaningless> meaningless();
// What asks for other numbers when it is switched on: by "enabled" in it or in anything inside, or by being true.
struct Refused {
  std::string_view key;
  std::string_view why;
  bool by_presence = false;  // by being there at all
};
std::span<const Refused> refused();
// Of the keys that translate() takes by name.
std::span<const std::string_view> translated();

}  // namespace ballast::deepspeed
