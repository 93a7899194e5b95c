# The scheduler micro-benchmark.
# SPDX-License-Identifier: Apache-2.0
add_executable(scheduler_bench ${CMAKE_CURRENT_LIST_DIR}/scheduler_bench.cc)
target_link_libraries(scheduler_bench PRIVATE ballast_schedule ballast_simulate benchmark::benchmark_main ballast_build)
