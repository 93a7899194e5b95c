// Sums over ranks that come out the same everywhere: ((x0 + x1) + x2) + ..., in rank order.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/engine/config.h>

#include <cstddef>
#include <span>

namespace ballast::communicators {

// destination[i] = sum over sources of source[i], in their order, in fp32, rounded once to `type`. The destination may
// be one of the sources, or apart from all; it does not overlap them otherwise. Pointers aligned to their element.
// Allocates nothing.
void sum_in_order(DataType type, std::span<const std::byte* const> sources, std::byte* destination,
                  std::size_t elements);
// The same in double; the destination is apart from all sources.
void sum_values_in_order(std::span<const std::byte* const> sources, double* destination, std::size_t count);

}  // namespace ballast::communicators
