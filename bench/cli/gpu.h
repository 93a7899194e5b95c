// What a GPU adds to this command: one of two sources, as CMake found CUDA or not.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ballast/communicators/bootstrap.h>
#include <ballast/engine/engine.h>

#include "accelerators.h"

namespace ballast::cli {

// Makes "device": "cuda" and "auto" find the back end, where it is part of this build.
void register_gpus();
void add_gpu_communicators(CommunicatorFactories& factories);
// What CUDA and NCCL tell about themselves and the devices.
void add_gpu_facts(AcceleratorFacts& facts);
// A gradient that depends on the parameter, computed on a stream of the GPU. UsageError in a build without.
void differentiate_on_gpu(const Tensor& parameter, const Tensor& gradient, float scale, const Stream& stream);

}  // namespace ballast::cli
