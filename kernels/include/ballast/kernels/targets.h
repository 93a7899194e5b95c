// Instruction sets: which are compiled in and run here, and forcing one (tests and benchmarks). The choice is Highway's
// own, so it holds for every user of Highway in the process.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ballast::kernels {

std::vector<std::string> supported_targets();  // best first, as this CPU runs them
std::string active_target();
// Restricts dispatch to one target ("AVX2"); an empty name restores the best. Returns false where it is not there.
// Not while another thread is in a kernel.
bool force_target(std::string_view name);

}  // namespace ballast::kernels
