# Kernels, and the loops that they are measured against (which `ballast bench adam` uses too).
# SPDX-License-Identifier: Apache-2.0
find_package(hwy REQUIRED)

add_library(ballast_yardsticks STATIC yardsticks.cc)
target_include_directories(ballast_yardsticks PUBLIC ${PROJECT_SOURCE_DIR}/bench)
target_link_libraries(ballast_yardsticks PRIVATE hwy::hwy ballast_build)
target_compile_features(ballast_yardsticks PUBLIC cxx_std_20)

add_executable(kernels_bench kernels_bench.cc)
target_link_libraries(kernels_bench PRIVATE ballast_kernels ballast_yardsticks benchmark::benchmark ballast_build)
