// Traffic in closed form.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/planner/traffic.h>

#include <algorithm>
#include <string>

#include "require.h"

namespace ballast::planner {

double collective_elements(const CollectiveCase& input) {
  require_stage(input.stage);
  require_positive(input.micro_batches, "the number of micro-batches");
  if (!(input.ranks >= 1)) throw ConfigError("the number of ranks must be at least 1");
  const double passes = input.vertical ? 1 : input.micro_batches;
  const double reductions = input.reduce_each_micro_batch ? passes : 1;
  // Below stage 3: gradients scattered, then gradients (stage 0) or parameters gathered. At stage 3 parameters are
  // gathered for forward and for backward of every pass.
  const double elements = reductions + (input.stage < 3 ? 1 : 2 * passes);
  return elements * (1 - 1 / input.ranks);
}

LinkBytes link_bytes(LinkPlacement placement, double ranks, bool recompute) {
  if (!(ranks >= 1)) throw ConfigError("the number of ranks must be at least 1");
  LinkBytes bytes;
  const double parameter = 2;
  const double uses = recompute ? 3 : 2;  // forward, backward, and where it was freed between recomputing and backward
  const int stage = placement == LinkPlacement::zero_offload ? 2 : 3;
  bytes.host_to_device = (stage == 2 ? parameter : uses * parameter) / ranks;
  bytes.device_to_host = 2 / ranks;
  bytes.network = 2 * collective_elements({.stage = stage, .ranks = ranks});
  NvmeBytes nvme;
  if (placement == LinkPlacement::parameters_host_rest_nvme) {
    nvme = nvme_bytes(nvme_layout("a-dram-params"));
  } else if (placement == LinkPlacement::all_on_nvme) {
    nvme = nvme_bytes(nvme_layout(recompute ? "a-all-recompute" : "a-all"));
  } else if (placement == LinkPlacement::split_master_on_nvme) {
    nvme = nvme_bytes(nvme_layout("b-fused"));
  }
  bytes.nvme_read = nvme.read / ranks;
  bytes.nvme_written = nvme.written / ranks;
  return bytes;
}

NvmeBytes nvme_bytes(const NvmeLayout& layout) {
  require_positive(layout.moment_bytes, "the bytes of a moment");
  const double parameter = 2;
  const double moments = 2 * layout.moment_bytes;
  NvmeBytes bytes;
  if (layout.master == MasterLayout::fp32) {
    const double gradient = layout.gradients_on_nvme ? 4 : 0;
    bytes.read = bytes.written = 4 + moments + gradient;
  } else {
    const double remainder = layout.master == MasterLayout::split ? 2 : 0;
    bytes.read = bytes.written = remainder + moments;
    if (layout.parameters_on_nvme && !layout.fused) bytes.read += parameter;
  }
  if (layout.parameters_on_nvme) {
    bytes.read += parameter * (layout.recompute_reads ? 3 : 2);
    bytes.written += parameter;
  }
  return bytes;
}

NvmeLayout nvme_layout(std::string_view name) {
  const auto starts = [&](std::string_view with) { return name.substr(0, with.size()) == with; };
  const auto holds = [&](std::string_view part) { return name.find(part) != name.npos; };
  NvmeLayout layout;
  if (starts("a-") || name == "a" || starts("mlp")) {
    layout.master = MasterLayout::fp32;
    layout.gradients_on_nvme = !starts("mlp");
    layout.parameters_on_nvme = holds("all");
    layout.recompute_reads = holds("recompute");
    return layout;
  }
  if (starts("bf16mv")) {
    layout.moment_bytes = 2;
  } else if (starts("c-") || name == "c") {
    layout.moment_bytes = kInt8MomentBytes;
  } else if (starts("d-sr")) {
    layout.master = MasterLayout::none;
    layout.moment_bytes = kInt8MomentBytes;
  } else if (!starts("b-") && name != "b") {
    throw ConfigError("no NVMe layout is named \"" + std::string(name.substr(0, 60)) + "\"");
  }
  layout.parameters_on_nvme = !holds("hi-dram") && !holds("dram-params");
  layout.fused = !holds("unfused");
  layout.recompute_reads = holds("recompute");
  return layout;
}

double uncached_share(double cached_fraction, bool fixed_or_alternating) {
  if (!(cached_fraction >= 0 && cached_fraction <= 1)) throw ConfigError("a cached fraction must be from 0 to 1");
  return fixed_or_alternating ? 1 - cached_fraction : cached_fraction < 1 ? 1 : 0;
}

double adam_bytes(const AdamLayout& layout) {
  require_positive(layout.moment_bytes, "the bytes of a moment");
  require_positive(layout.gradient_bytes, "the bytes of a gradient");
  const double moments = 2 * layout.moment_bytes;
  // fp32: the master is read and written, and the 16-bit copy written besides.
  if (layout.master == MasterLayout::fp32) return 2 * (4 + moments) + layout.gradient_bytes + 2;
  const double master = layout.master == MasterLayout::split ? 4 : 2;
  return 2 * (master + moments) + layout.gradient_bytes;
}

AdamLayout adam_layout(std::string_view name) {
  const auto holds = [&](std::string_view part) { return name.find(part) != name.npos; };
  AdamLayout layout;
  if (holds("grad32") || holds("fp32-grad") || holds("fp32grad")) layout.gradient_bytes = 4;
  if (name.substr(0, 4) == "fp32") {
    layout.master = MasterLayout::fp32;
  } else if (name.substr(0, 4) != "hilo") {
    throw ConfigError("no layout of Adam states is named \"" + std::string(name.substr(0, 60)) + "\"");
  } else if (holds("8bit") || holds("int8") || holds("8-bit")) {
    layout.moment_bytes = kInt8MomentBytes;
  } else if (holds("bf16") || holds("16bit")) {
    layout.moment_bytes = 2;
  }
  return layout;
}

double storage_bound_speed_up(double bytes_ratio) {
  require_positive(bytes_ratio, "the ratio of bytes");
  return 1 / bytes_ratio;
}

double largest_speed_up(double bytes_ratio) {
  require_positive(bytes_ratio, "the ratio of bytes");
  const double compute = std::min(bytes_ratio, 1.0);  // over transfers before; the gain is largest there
  return (compute + 1) / std::max(compute, bytes_ratio);
}

}  // namespace ballast::planner
