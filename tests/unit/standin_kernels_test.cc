// The bodies of the CUDA kernels, run on the host by the stand-in.
// SPDX-License-Identifier: Apache-2.0
#include "unit/device_kernels_test.h"
