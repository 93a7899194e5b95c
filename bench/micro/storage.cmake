# The storage micro-benchmark.
# SPDX-License-Identifier: Apache-2.0
find_package(benchmark REQUIRED)
add_executable(storage_bench ${CMAKE_CURRENT_LIST_DIR}/storage_bench.cc)
target_link_libraries(storage_bench PRIVATE ballast::io benchmark::benchmark_main ballast_build)
