// What the kernels' speed is measured against: loops of the same instruction set that do less, over the same bytes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace ballast::yardsticks {

// Reads all bytes and writes them back as they were: the traffic of an update in place with no arithmetic.
void rewrite(void* data, std::size_t bytes);

// The first of the usual three passes: destination = scale * source, into an fp32 gradient of its own.
void unscale_bf16(const std::uint16_t* source, float scale, float* destination, std::size_t count);

}  // namespace ballast::yardsticks
