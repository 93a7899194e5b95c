// MappedMemory: large anonymous memory taken at once, on the largest pages to be had. What both slabs are made of.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/offload/topology.h"

namespace ballast::offload {

constexpr std::string_view kReservedHugePages = "reserved huge pages";
constexpr std::string_view kTransparentHugePages = "transparent huge pages";
constexpr std::string_view kPlainPages = "4 KiB pages";

struct MappedMemory {
  std::byte* data = nullptr;
  std::uint64_t mapped_bytes = 0;  // what unmap() gives back; at least what was asked for
  std::string_view page_kind;
  pid_t owner = 0;  // only this process gives it back
};

struct MapRequest {
  std::string_view purpose;  // "host memory", for errors
  std::uint64_t bytes = 0;
  int numa_node = -1;  // -1: no binding
  bool populate = true;
  std::function<void()> check_interrupt = {};  // called between pieces; what it throws leaves map_memory()
};

// Takes zeroed memory aligned to 2 MiB, not inherited by fork and absent from core dumps. Throws PlanError with the
// numbers where `topology` says that it is not free, or where the system refuses it; what is only less good (small
// pages, no binding) becomes a note.
MappedMemory map_memory(const MapRequest& request, const Topology& topology, std::vector<std::string>& notes);
void unmap_memory(const MappedMemory& memory);

// Left for page tables, stacks and heap: with a limit used up to the last byte the kernel would end the process.
constexpr std::uint64_t kHeadroomBytes = std::uint64_t{16} << 20;

// The most that check_free_memory() lets through.
std::uint64_t takeable_bytes(const Topology& topology);
// Throws PlanError unless `bytes` are free: names what the machine and its control group leave.
void check_free_memory(std::string_view purpose, std::uint64_t bytes, const Topology& topology);

// Backs every page of writable, untouched memory on kernels without MADV_POPULATE_WRITE. Returns 0 or an errno (EFAULT
// where no page is to be had), never a signal.
int populate_by_reading(std::byte* data, std::uint64_t bytes);

}  // namespace ballast::offload
