// A build without CUDA.
// SPDX-License-Identifier: Apache-2.0
#include <ballast/base/error.h>

#include "gpu.h"

namespace ballast::cli {

void register_gpus() {}
void add_gpu_communicators(CommunicatorFactories&) {}
void add_gpu_facts(AcceleratorFacts&) {}
void differentiate_on_gpu(const Tensor&, const Tensor&, float, const Stream&) {
  throw UsageError("this build has no CUDA back end (BALLAST_CUDA=ON)");
}

}  // namespace ballast::cli
