// A machine as the planner knows it: rates, sizes and endurance of one node, each with where the number comes from.
//
// The JSON form is an object of "name" (text) and the quantities below, each {"value": number, "unit": text, "source":
// text}. Units are decimal (GB/s is 1e9 bytes per second; GB, TB) or binary where they say so (GiB, TiB); times ns, us,
// ms, s; compute TFLOP/s, GFLOP/s, PFLOP/s. Unknown keys and units are errors that name the nearest known one.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/planner/rates.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace ballast::planner {

struct HardwareProfile {
  std::string name;

  // Of a node. What has no default must be given.
  double devices = 1;             // that train, one rank each
  double host_memory = 0;         // bytes
  double memory_rate = 0;         // bytes per second that the node's memory reads and writes in a CPU update
  double nvme_read = 0;           // bytes per second, all drives together; 0: no drives
  double nvme_write = 0;          //
  double nvme_duplex = 1;         // as in nvme_seconds()
  double nvme_latency = 100e-6;   // seconds, of a request
  double nvme_capacity = 0;       // bytes
  double nvme_endurance = 0;      // bytes that the drives together are rated for; 0: not known
  double copies = 0;              // bytes per second each way over all device links together; 0: devices do not share
  double network = 0;             // bytes per second each way to other nodes; 0: a node alone
  double network_latency = 5e-6;  // seconds, of one step of a ring

  // Of a device.
  double device_memory = 0;   // bytes
  double compute = 0;         // flop per second that dense products reach in practice
  double peak = 0;            // flop per second of the data sheet, for the share of peak; 0: as `compute`
  double host_to_device = 0;  // bytes per second, alone
  double device_to_host = 0;  //
  double copies_duplex = 2;   // both ways at once, over one way alone: 2 where neither slows the other
  double device_link = 0;     // bytes per second each way to the other devices of the node; 0: through the host

  std::map<std::string, std::string, std::less<>> sources;  // by key

  // Throw ConfigError naming the file, line, key, and what would do.
  static HardwareProfile from_file(const std::string& path);
  static HardwareProfile from_json(std::string_view text, const std::string& name = "hardware profile");
  void validate(const std::string& name) const;
};

// A machine of two cores and one virtual NVMe drive: what is taken where no profile is given.
const HardwareProfile& two_core_profile();
std::string_view two_core_profile_json();

// Rates of one of `ranks` ranks, as many on each node as it has devices: what a node's ranks share is divided.
struct RankRates {
  StepRates step;
  double nvme_latency = 0, network_latency = 0;
  double ranks_on_node = 1, nodes = 1;
};
RankRates rank_rates(const HardwareProfile& hardware, double ranks);

}  // namespace ballast::planner
