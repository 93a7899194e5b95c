// HostSlab: memory taken once, ranges handed out from the front.
// SPDX-License-Identifier: Apache-2.0
#include "ballast/offload/slab.h"

#include <utility>

#include "ballast/base/check.h"
#include "ballast/base/error.h"
#include "ballast/base/size.h"
#include "mapped_memory.h"

namespace ballast::offload {

HostSlab::HostSlab(const HostSlabOptions& options) {
  const MappedMemory mapped =
      map_memory({"host memory", options.bytes, options.numa_node, options.populate, options.check_interrupt},
                 discover_topology(), notes_);
  memory_ = {mapped.data, options.bytes};
  mapped_bytes_ = mapped.mapped_bytes;
  owner_process_ = mapped.owner;
  page_kind_ = mapped.page_kind;
}

HostSlab::~HostSlab() { unmap_memory({memory_.data(), mapped_bytes_, page_kind_, owner_process_}); }

std::byte* HostSlab::take(std::string name, std::uint64_t bytes, std::uint64_t alignment_bytes) {
  BALLAST_CHECK(alignment_bytes != 0 && (alignment_bytes & (alignment_bytes - 1)) == 0);
  // The base is aligned to 2 MiB: beyond that an offset says nothing about an address.
  BALLAST_CHECK(alignment_bytes <= 2 * base::kMiB);
  const std::uint64_t offset = base::round_up(taken_bytes_, alignment_bytes);
  if (offset > memory_.size() || bytes > memory_.size() - offset) {
    std::string text = "\"" + name + "\" of " + std::to_string(bytes) + " bytes does not fit the host slab of " +
                       std::to_string(memory_.size()) + " bytes: " + std::to_string(taken_bytes_) + " are taken";
    for (const Range& range : ranges_) text += ", " + range.name + " " + base::format_size(range.bytes);
    throw PlanError(text + ". Raise budget.host");
  }
  ranges_.push_back({std::move(name), offset, bytes});
  taken_bytes_ = offset + bytes;
  return memory_.data() + offset;
}

}  // namespace ballast::offload
