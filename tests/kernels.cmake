# Kernel tests.
# SPDX-License-Identifier: Apache-2.0
foreach(part adam adam_values convert reduce targets)
  ballast_add_test(kernels_${part}_test LABEL unit SOURCES unit/kernels_${part}_test.cc
                   LIBRARIES ballast_kernels ballast_base)
  target_include_directories(kernels_${part}_test PRIVATE ${PROJECT_SOURCE_DIR}/kernels)
endforeach()
