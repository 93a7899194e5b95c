// Which instruction sets are compiled in and run here, and forcing one.
// SPDX-License-Identifier: Apache-2.0
#include "ballast/kernels/targets.h"

#include <cstdint>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/targets.cc"
#include <hwy/foreach_target.h>  // before highway.h
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {
namespace {

std::int64_t running_target() { return HWY_TARGET; }

}  // namespace
}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {
namespace {

HWY_EXPORT(running_target);

// The fallback is in every build and needs no instruction of its own; Highway's own build may name another one.
// Asked once, since asking resets the choice.
std::int64_t usable_targets() {
  constexpr std::int64_t kFallbacks = HWY_SCALAR | HWY_EMU128;
  static const std::int64_t targets = HWY_TARGETS & (hwy::SupportedTargets() | kFallbacks);
  return targets;
}

}  // namespace

std::vector<std::string> supported_targets() {
  std::vector<std::string> names;
  // Highway numbers better targets lower.
  for (std::int64_t targets = usable_targets(); targets != 0; targets &= targets - 1) {
    names.emplace_back(hwy::TargetName(targets & -targets));
  }
  return names;
}

std::string active_target() { return hwy::TargetName(HWY_DYNAMIC_DISPATCH(running_target)()); }

bool force_target(std::string_view name) {
  // The choice is cached where the loops look it up: it is written there, not into Highway's list of supported targets.
  if (name.empty()) {
    hwy::GetChosenTarget().Update(usable_targets());
    return true;
  }
  for (std::int64_t targets = usable_targets(); targets != 0; targets &= targets - 1) {
    const std::int64_t target = targets & -targets;
    if (name != hwy::TargetName(target)) continue;
    hwy::GetChosenTarget().Update(target);
    return true;
  }
  return false;
}

}  // namespace ballast::kernels
#endif  // HWY_ONCE
