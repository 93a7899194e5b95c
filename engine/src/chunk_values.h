// A chunk's states, as they are stored, from and to fp32 values.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/config.h>
#include <ballast/kernels/moments.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "layout.h"

namespace ballast::engine {

// Values of all elements of a chunk to its parameter and master, and back; exact. `extent` is [parameter, master,
// exp_avg, exp_avg_sq].
void to_states(const ChunkLayout& chunk, const float* values, std::byte* extent);
void to_values(const ChunkLayout& chunk, const std::byte* extent, float* values);

// One moment of a chunk: elements from `first` on, and all of them from values. bf16 and 8-bit moments round, as the
// update does; what was read of either is stored as the same values again.
void moment_values(MomentType type, kernels::Moment which, const std::byte* moment, std::uint64_t first,
                   std::span<float> values);
void to_moment(MomentType type, kernels::Moment which, std::span<const float> values, std::byte* moment);

}  // namespace ballast::engine
