// The known key that a misspelt one was most likely meant to be.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace ballast {

// `unknown` and `known` are dotted ("optimizer.timing"). Letters' case counts little; the same section counts a little.
std::string_view nearest_key(std::string_view unknown, std::span<const std::string_view> known);
// Whether `unknown` can be `known` misspelt: six letters or more, of which at most two are wrong, in the same section.
bool is_misspelling(std::string_view unknown, std::string_view known);

}  // namespace ballast
