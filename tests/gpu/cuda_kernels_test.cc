// The CUDA kernels on a GPU, where there is one.
// SPDX-License-Identifier: Apache-2.0
#include "unit/device_kernels_test.h"
