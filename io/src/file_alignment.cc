// Alignment from statx, or from the block device under the file.
// SPDX-License-Identifier: Apache-2.0
#include "file_alignment.h"

#include <ballast/base/error.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <fstream>
#include <string>

#include "errno_text.h"

namespace ballast::io {
namespace {

constexpr std::uint64_t kLeast = 512;
constexpr std::uint64_t kMost = 1 << 20;  // beyond this a stated value is nonsense

bool plausible(std::uint64_t alignment) { return std::has_single_bit(alignment) && alignment <= kMost; }

// The logical sector size of the device that holds the file; 0 where it is not on one.
std::uint64_t device_sector_bytes(const struct stat& status) {
  const dev_t device = S_ISBLK(status.st_mode) ? status.st_rdev : status.st_dev;
  const std::string base = "/sys/dev/block/" + std::to_string(major(device)) + ":" + std::to_string(minor(device));
  for (const char* place : {"/queue/logical_block_size", "/../queue/logical_block_size"}) {
    std::ifstream file(base + place);
    std::uint64_t bytes = 0;
    if (file >> bytes && plausible(bytes)) return bytes;
  }
  return 0;
}

}  // namespace

std::uint64_t stated_alignment_bytes(int descriptor) {
  const int flags = ::fcntl(descriptor, F_GETFL);
  struct stat status;
  if (flags < 0 || ::fstat(descriptor, &status) != 0) {
    throw IoError("file descriptor " + std::to_string(descriptor) + " cannot be used: " + errno_text(errno));
  }
  if ((flags & O_DIRECT) == 0) return 1;
  std::uint64_t alignment = std::max(kLeast, device_sector_bytes(status));
#ifdef STATX_DIOALIGN
  struct statx extended = {};
  if (::statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &extended) == 0 &&
      (extended.stx_mask & STATX_DIOALIGN) != 0) {
    if (plausible(extended.stx_dio_offset_align))
      alignment = std::max<std::uint64_t>(alignment, extended.stx_dio_offset_align);
    if (plausible(extended.stx_dio_mem_align))
      alignment = std::max<std::uint64_t>(alignment, extended.stx_dio_mem_align);
  }
#endif
  return alignment;
}

}  // namespace ballast::io
