// Hardware profiles: reading them, and sharing a node out among its ranks.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/planner/hardware.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <limits>
#include <vector>

#include "json_value.h"
#include "nearest_key.h"
#include "require.h"

namespace ballast::planner {

namespace {

enum class Dimension : std::uint8_t { count, bytes, rate, seconds, flops, factor };

struct Unit {
  std::string_view name;
  Dimension dimension;
  double value;
};
constexpr std::array<Unit, 24> kUnits = {
    {{"devices", Dimension::count, 1},    {"B", Dimension::bytes, 1},         {"MB", Dimension::bytes, 1e6},
     {"GB", Dimension::bytes, 1e9},       {"TB", Dimension::bytes, 1e12},     {"PB", Dimension::bytes, 1e15},
     {"MiB", Dimension::bytes, 0x1p20},   {"GiB", Dimension::bytes, 0x1p30},  {"TiB", Dimension::bytes, 0x1p40},
     {"B/s", Dimension::rate, 1},         {"MB/s", Dimension::rate, 1e6},     {"GB/s", Dimension::rate, 1e9},
     {"TB/s", Dimension::rate, 1e12},     {"MiB/s", Dimension::rate, 0x1p20}, {"GiB/s", Dimension::rate, 0x1p30},
     {"ns", Dimension::seconds, 1e-9},    {"us", Dimension::seconds, 1e-6},   {"ms", Dimension::seconds, 1e-3},
     {"s", Dimension::seconds, 1},        {"GFLOP/s", Dimension::flops, 1e9}, {"TFLOP/s", Dimension::flops, 1e12},
     {"PFLOP/s", Dimension::flops, 1e15}, {"factor", Dimension::factor, 1},   {"TBW", Dimension::bytes, 1e12}}};

struct Key {
  std::string_view name;
  Dimension dimension;
  double HardwareProfile::*member;
  bool required;
};
using P = HardwareProfile;
constexpr std::array<Key, 19> kKeys = {{{"devices", Dimension::count, &P::devices, true},
                                        {"host_memory", Dimension::bytes, &P::host_memory, true},
                                        {"memory_rate", Dimension::rate, &P::memory_rate, true},
                                        {"nvme_read", Dimension::rate, &P::nvme_read, false},
                                        {"nvme_write", Dimension::rate, &P::nvme_write, false},
                                        {"nvme_duplex", Dimension::factor, &P::nvme_duplex, false},
                                        {"nvme_latency", Dimension::seconds, &P::nvme_latency, false},
                                        {"nvme_capacity", Dimension::bytes, &P::nvme_capacity, false},
                                        {"nvme_endurance", Dimension::bytes, &P::nvme_endurance, false},
                                        {"copies", Dimension::rate, &P::copies, false},
                                        {"network", Dimension::rate, &P::network, false},
                                        {"network_latency", Dimension::seconds, &P::network_latency, false},
                                        {"device_memory", Dimension::bytes, &P::device_memory, true},
                                        {"compute", Dimension::flops, &P::compute, true},
                                        {"peak", Dimension::flops, &P::peak, false},
                                        {"host_to_device", Dimension::rate, &P::host_to_device, true},
                                        {"device_to_host", Dimension::rate, &P::device_to_host, true},
                                        {"copies_duplex", Dimension::factor, &P::copies_duplex, false},
                                        {"device_link", Dimension::rate, &P::device_link, false}}};

[[noreturn]] void fail(const std::string& where, const std::string& text) { throw ConfigError(where + ": " + text); }

// " (did you mean ...?)" for a key or a unit.
template <class List>
std::string nearest_of(std::string_view unknown, const List& known) {
  return "; the nearest known one is \"" + std::string(nearest_key(unknown, known)) + "\"";
}

std::string text_of(const json::Value& value, const char* key) {
  if (value.kind != json::Value::Kind::string || value.text.empty())
    fail(value.where, std::string("\"") + key + "\" must be a text, not " + json::describe(value));
  return value.text;
}

double quantity(const std::string& key, Dimension dimension, const json::Value& object, std::string& source) {
  if (object.kind != json::Value::Kind::object) {
    fail(object.where, "\"" + key + "\" must be {\"value\": number, \"unit\": text, \"source\": text}, not " +
                           json::describe(object));
  }
  constexpr std::array<std::string_view, 3> kParts = {"value", "unit", "source"};
  for (std::size_t i = 0; i < object.keys.size(); ++i) {
    if (std::find(kParts.begin(), kParts.end(), object.keys[i]) == kParts.end()) {
      fail(object.items[i].where, "unknown key " + json::printable(object.keys[i]) + " in \"" + key + "\"" +
                                      nearest_of(object.keys[i], kParts));
    }
  }
  for (const std::string_view part : kParts) {
    if (object.find(part) == nullptr)
      fail(object.where, "\"" + key + "\" has no \"" + std::string(part) + "\"; each number names its unit and source");
  }
  const json::Value& value = *object.find("value");
  const std::optional<double> number =
      value.kind == json::Value::Kind::number ? json::to_double(value.text) : std::nullopt;
  if (!number || !std::isfinite(*number) || *number < 0)
    fail(value.where, "\"" + key + "\" must be a number, 0 or more, not " + json::describe(value));
  source = text_of(*object.find("source"), "source");
  const std::string unit = text_of(*object.find("unit"), "unit");
  std::vector<std::string_view> fitting;
  for (const Unit& known : kUnits) {
    if (known.dimension != dimension) continue;
    if (known.name == unit) return *number * known.value;
    fitting.push_back(known.name);
  }
  fail(object.find("unit")->where,
       "unit " + json::printable(unit) + " does not fit \"" + key + "\"" + nearest_of(unit, fitting));
}

}  // namespace

HardwareProfile HardwareProfile::from_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw ConfigError(path + ": the hardware profile cannot be opened; does it exist, and may it be read?");
  std::string text(json::kTextBytesMax + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (in.bad() || (in.fail() && !in.eof())) throw ConfigError(path + ": the hardware profile cannot be read");
  text.resize(static_cast<std::size_t>(in.gcount()));
  return from_json(text, path);
}

HardwareProfile HardwareProfile::from_json(std::string_view text, const std::string& name) {
  const json::Value root = json::parse(text, name);
  if (root.kind != json::Value::Kind::object)
    fail(name, "a hardware profile is an object, not " + json::describe(root));
  HardwareProfile profile;
  for (std::size_t i = 0; i < root.keys.size(); ++i) {
    const std::string& key = root.keys[i];
    if (key == "name") {
      profile.name = text_of(root.items[i], "name");
      continue;
    }
    const auto known = std::find_if(kKeys.begin(), kKeys.end(), [&](const Key& k) { return k.name == key; });
    if (known == kKeys.end()) {
      std::vector<std::string_view> names = {"name"};
      for (const Key& k : kKeys) names.push_back(k.name);
      fail(root.items[i].where, "unknown key " + json::printable(key) + nearest_of(key, names));
    }
    profile.*known->member = quantity(key, known->dimension, root.items[i], profile.sources[key]);
  }
  if (profile.name.empty()) fail(name, "\"name\" is missing");
  for (const Key& key : kKeys) {
    if (key.required && root.find(key.name) == nullptr) fail(name, "\"" + std::string(key.name) + "\" is missing");
  }
  profile.validate(name);
  return profile;
}

void HardwareProfile::validate(const std::string& where) const {
  const auto require = [&](bool holds, const std::string& text) {
    if (!holds) fail(where, text);
  };
  for (const Key& key : kKeys) {
    if (key.required) require(this->*key.member > 0, "\"" + std::string(key.name) + "\" must be above 0");
    require(std::isfinite(this->*key.member) && this->*key.member >= 0,
            "\"" + std::string(key.name) + "\" must be a number, 0 or more");
  }
  require(devices == std::floor(devices) && devices <= 4096, "\"devices\" must be a whole number from 1 to 4096");
  require(nvme_duplex >= 1 && nvme_duplex <= 2, "\"nvme_duplex\" must be from 1 (in turn) to 2 (independent)");
  require(copies_duplex >= 1 && copies_duplex <= 2, "\"copies_duplex\" must be from 1 (in turn) to 2 (independent)");
  require((nvme_read > 0) == (nvme_write > 0), "\"nvme_read\" and \"nvme_write\" belong together");
  require(nvme_latency <= 1 && network_latency <= 1, "a latency must be at most 1 s");
}

RankRates rank_rates(const HardwareProfile& hardware, double ranks) {
  require_positive(ranks, "the number of ranks");
  RankRates rates;
  const double here = std::min(ranks, hardware.devices);
  rates.ranks_on_node = here;
  rates.nodes = std::ceil(ranks / hardware.devices);
  StepRates& step = rates.step;
  const double shared = hardware.copies > 0 ? hardware.copies / here : std::numeric_limits<double>::infinity();
  step.flops = hardware.compute;
  step.host_to_device = std::min(hardware.host_to_device, shared);
  step.device_to_host = std::min(hardware.device_to_host, shared);
  step.copies_duplex = hardware.copies_duplex;
  step.nvme_read = hardware.nvme_read / here;
  step.nvme_write = hardware.nvme_write / here;
  step.nvme_duplex = hardware.nvme_duplex;
  step.memory = hardware.memory_rate / here;
  // A ring crosses each border of a node once, however many ranks the node has.
  const double within =
      hardware.device_link > 0 ? hardware.device_link : std::min(step.host_to_device, step.device_to_host);
  if (rates.nodes > 1 && hardware.network == 0) {
    throw ConfigError(hardware.name + " has " + std::to_string(static_cast<long>(hardware.devices)) +
                      " devices and no \"network\" to other nodes; more ranks than devices need one");
  }
  step.network = rates.nodes > 1 ? std::min(within, hardware.network) : within;
  rates.nvme_latency = hardware.nvme_latency;
  rates.network_latency = hardware.network_latency;
  return rates;
}

const HardwareProfile& two_core_profile() {
  static const HardwareProfile kProfile = HardwareProfile::from_json(two_core_profile_json(), "built-in profile");
  return kProfile;
}

}  // namespace ballast::planner
