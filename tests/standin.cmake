# The stand-in for CUDA, and what runs over it: the sources of the back end as they are, compiled by the C++ compiler
# and linked with tests/standin in place of the vendor's library. Where the vendor's headers are found they are used, so
# that our calls and the stand-in's agree with them; elsewhere the few declarations of tests/standin/headers do.
# SPDX-License-Identifier: Apache-2.0
find_path(BALLAST_CUDA_INCLUDE_DIR cuda_runtime_api.h HINTS ${CUDAToolkit_INCLUDE_DIRS} /usr/local/cuda/include)
mark_as_advanced(BALLAST_CUDA_INCLUDE_DIR)
set(standin_own_headers ${CMAKE_CURRENT_SOURCE_DIR}/standin/headers)
set(standin_kernel_sources
    ${PROJECT_SOURCE_DIR}/kernels/cuda/src/adam.cu ${PROJECT_SOURCE_DIR}/kernels/cuda/src/arrays.cu)
set_source_files_properties(${standin_kernel_sources} PROPERTIES LANGUAGE CXX)
set(cuda_sources ${PROJECT_SOURCE_DIR}/offload/cuda/src)

# ballast_add_standin(<target> <folder of cuda_runtime_api.h>)
function(ballast_add_standin target headers)
  add_library(${target} STATIC
    standin/src/streams.cc standin/src/world.cc ${standin_kernel_sources}
    ${cuda_sources}/cuda_device.cc ${cuda_sources}/cuda_kernels.cc ${cuda_sources}/cuda_stream.cc
    ${cuda_sources}/describe.cc ${cuda_sources}/device_state.cc ${cuda_sources}/pci.cc)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target} PUBLIC standin/include ${PROJECT_SOURCE_DIR}/offload/cuda/include
                             ${PROJECT_SOURCE_DIR}/kernels/cuda/include PRIVATE ${PROJECT_SOURCE_DIR}/kernels/cuda/src)
  target_include_directories(${target} SYSTEM PUBLIC ${headers})
  target_link_libraries(${target} PUBLIC ballast_offload ballast_kernels ballast_base
                        PRIVATE Threads::Threads ballast_build)
endfunction()

if(BALLAST_CUDA_INCLUDE_DIR)
  ballast_add_standin(ballast_standin ${BALLAST_CUDA_INCLUDE_DIR})
  # Compiled here too, so that they do not go stale where nobody needs them.
  ballast_add_standin(ballast_standin_own_headers ${standin_own_headers})
else()
  ballast_add_standin(ballast_standin ${standin_own_headers})
endif()

ballast_add_test(standin_device_test LABEL contract TIMEOUT 300
  SOURCES contract/standin_device_test.cc LIBRARIES ballast_standin)

ballast_add_test(standin_kernels_test LABEL unit TIMEOUT 120
  SOURCES unit/standin_kernels_test.cc LIBRARIES ballast_standin)

add_executable(device_bench_standin gpu/device_bench.cc)
target_link_libraries(device_bench_standin PRIVATE ballast_standin ballast_build)
add_test(NAME device_bench_standin COMMAND device_bench_standin 0.1)
set_tests_properties(device_bench_standin PROPERTIES LABELS unit TIMEOUT 60 PASS_REGULAR_EXPRESSION "adam_over_copy")

# The same sources over the vendor's library: they link everywhere, and run where there is a GPU.
if(BALLAST_HAVE_CUDA)
  ballast_add_test(cuda_device_test LABEL gpu TIMEOUT 120 SOURCES gpu/cuda_device_test.cc LIBRARIES ballast::cuda)
  add_executable(device_bench gpu/device_bench.cc)
  target_link_libraries(device_bench PRIVATE ballast::cuda ballast_build)
  ballast_add_test(cuda_kernels_test LABEL gpu TIMEOUT 120
    SOURCES gpu/cuda_kernels_test.cc LIBRARIES ballast::cuda ballast::kernels_cuda)
endif()

find_path(BALLAST_NCCL_INCLUDE_DIR nccl.h HINTS ${BALLAST_CUDA_INCLUDE_DIR})
mark_as_advanced(BALLAST_NCCL_INCLUDE_DIR)
set(nccl_sources ${PROJECT_SOURCE_DIR}/engine/communicators/nccl)
function(ballast_add_standin_nccl target standin headers)
  add_library(${target} STATIC standin/src/nccl.cc ${nccl_sources}/src/id_exchange.cc
              ${nccl_sources}/src/nccl_communicator.cc ${nccl_sources}/src/nccl_state.cc)
  target_include_directories(${target} PUBLIC ${nccl_sources}/include
                             PRIVATE ${PROJECT_SOURCE_DIR}/engine/communicators/src)
  target_include_directories(${target} SYSTEM PUBLIC ${headers})
  target_link_libraries(${target} PUBLIC ${standin} ballast_engine PRIVATE Threads::Threads ballast_build)
endfunction()
if(BALLAST_CUDA_INCLUDE_DIR AND BALLAST_NCCL_INCLUDE_DIR)
  ballast_add_standin_nccl(ballast_standin_nccl ballast_standin ${BALLAST_NCCL_INCLUDE_DIR})
  ballast_add_standin_nccl(ballast_standin_nccl_own_headers ballast_standin_own_headers ${standin_own_headers})
elseif(BALLAST_CUDA_INCLUDE_DIR)
  ballast_add_standin_nccl(ballast_standin_nccl ballast_standin_own_headers ${standin_own_headers})
else()
  ballast_add_standin_nccl(ballast_standin_nccl ballast_standin ${standin_own_headers})
endif()
ballast_add_test(standin_nccl_test LABEL contract TIMEOUT 300
  SOURCES contract/standin_nccl_test.cc stress/allocation_counter.cc
  LIBRARIES ballast_standin_nccl)

# The command as it is where there is a GPU: its objects, with the stand-in behind them. For tests/gpu/run --stand-in.
if(TARGET ballast)
  add_executable(ballast_over_standin EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/bench/cli/gpu_cuda.cc
                 "$<FILTER:$<TARGET_OBJECTS:ballast>,EXCLUDE,gpu_(none|cuda)[.]cc>")
  target_compile_definitions(ballast_over_standin PRIVATE BALLAST_HAVE_NCCL=1)
  target_include_directories(ballast_over_standin PRIVATE ${PROJECT_SOURCE_DIR}/bench)
  get_target_property(libraries ballast LINK_LIBRARIES)
  list(FILTER libraries EXCLUDE REGEX "ballast_(cuda|kernels_cuda|nccl)|CLI11|nlohmann")
  target_link_libraries(ballast_over_standin PRIVATE ballast_standin_nccl ${libraries})
endif()

if(NOT BALLAST_BENCH)
  return()  # it trains the units of the reference GPT
endif()
ballast_add_test(standin_engine_test LABEL integration TIMEOUT 600
  SOURCES integration/standin_engine_test.cc LIBRARIES ballast_standin_nccl ballast_gpt)
target_include_directories(standin_engine_test PRIVATE ${PROJECT_SOURCE_DIR}/bench)
ballast_add_test(standin_ranks_test LABEL integration TIMEOUT 600
  SOURCES integration/standin_ranks_test.cc LIBRARIES ballast_standin_nccl)
ballast_add_test(standin_failures_test LABEL integration TIMEOUT 1800
  SOURCES integration/standin_failures_test.cc LIBRARIES ballast_standin_nccl)
target_compile_definitions(standin_failures_test PRIVATE BALLAST_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
