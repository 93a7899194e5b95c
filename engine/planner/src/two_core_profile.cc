// The profile of a two-core machine, as configs/hardware/two-core.json has it (a test compares them).
// SPDX-License-Identifier: Apache-2.0
#include <ballast/planner/hardware.h>

namespace ballast::planner {

std::string_view two_core_profile_json() {
  return R"json({
  "name": "two cores of an AMD EPYC virtual machine, one virtual NVMe drive",
  "devices": {"value": 1, "unit": "devices",
    "source": "the host device: the CPU itself"},
  "device_memory": {"value": 16, "unit": "GB",
    "source": "a part of host memory"},
  "compute": {"value": 600, "unit": "GFLOP/s",
    "source": "oneDNN multiplies bf16 at 740 GFLOP/s on two cores; 0.8 of it in a trainer, by design"},
  "peak": {"value": 740, "unit": "GFLOP/s",
    "source": "oneDNN, bf16, large square matrices on two cores, measured"},
  "host_memory": {"value": 16, "unit": "GB",
    "source": "this class of machine"},
  "memory_rate": {"value": 62, "unit": "GB/s",
    "source": "one-pass update: 2.4 G parameters/s at 26 bytes, measured by ballast bench adam"},
  "host_to_device": {"value": 4.8, "unit": "GB/s",
    "source": "a copy in memory, ballast bench copy beside other work"},
  "device_to_host": {"value": 4.4, "unit": "GB/s",
    "source": "a copy in memory, ballast bench copy beside other work"},
  "nvme_read": {"value": 6, "unit": "GB/s",
    "source": "5.9 to 6.5 from huge pages with registered buffers, ballast bench io"},
  "nvme_write": {"value": 6, "unit": "GB/s",
    "source": "5.9 to 6.5 from huge pages with registered buffers, ballast bench io"},
  "nvme_capacity": {"value": 200, "unit": "GB",
    "source": "this class of machine"}
}
)json";
}

}  // namespace ballast::planner
