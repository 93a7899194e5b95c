// What direct I/O on a file demands of offsets, lengths and addresses.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ballast::io {

// For a descriptor with O_DIRECT the alignment that its file system or device states (512 where both are silent); 1 for
// others. Throws IoError where the descriptor is not usable.
std::uint64_t stated_alignment_bytes(int descriptor);

}  // namespace ballast::io
