# Kernel tests: each on every instruction set that runs here. kernels/reference holds the arithmetic in double.
# SPDX-License-Identifier: Apache-2.0
function(ballast_add_kernel_test name source)
  ballast_add_test(${name} LABEL unit SOURCES ${source} LIBRARIES ballast_kernels ballast_base)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/kernels)
endfunction()

ballast_add_kernel_test(kernels_adam_test unit/kernels_adam_test.cc)
ballast_add_kernel_test(kernels_adam_values_test unit/kernels_adam_values_test.cc)
ballast_add_kernel_test(kernels_convert_test unit/kernels_convert_test.cc)
ballast_add_kernel_test(kernels_moments_test unit/kernels_moments_test.cc)
ballast_add_kernel_test(kernels_reduce_test unit/kernels_reduce_test.cc)
ballast_add_kernel_test(kernels_targets_test unit/kernels_targets_test.cc)
