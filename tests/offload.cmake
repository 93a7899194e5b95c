# Tests of offload/. Those of private parts see its src folder.
# SPDX-License-Identifier: Apache-2.0
find_package(TBB REQUIRED CONFIG)

ballast_add_test(device_contract_test LABEL contract TIMEOUT 120
  SOURCES contract/device_contract_test.cc LIBRARIES ballast::offload)
ballast_add_test(cpu_pool_contract_test LABEL contract TIMEOUT 120
  SOURCES contract/cpu_pool_contract_test.cc contract/outer_loop.cc LIBRARIES ballast::offload TBB::tbb)
ballast_add_test(slab_test LABEL unit TIMEOUT 120
  SOURCES unit/slab_test.cc LIBRARIES ballast::offload)
ballast_add_test(topology_test LABEL unit TIMEOUT 120
  SOURCES unit/topology_test.cc LIBRARIES ballast::offload)
ballast_add_test(machine_share_test LABEL unit TIMEOUT 120
  SOURCES unit/machine_share_test.cc LIBRARIES ballast::offload)
ballast_add_test(chunk_work_test LABEL unit TIMEOUT 120
  SOURCES unit/chunk_work_test.cc LIBRARIES ballast::offload TBB::tbb)
ballast_add_test(doctor_test LABEL unit TIMEOUT 120
  SOURCES unit/doctor_test.cc ${PROJECT_SOURCE_DIR}/bench/cli/accelerators.cc ${PROJECT_SOURCE_DIR}/bench/cli/doctor.cc
  LIBRARIES ballast::offload ballast::io ballast::kernels)
target_include_directories(doctor_test PRIVATE ${PROJECT_SOURCE_DIR}/bench)
foreach(name cpu_pool_contract_test slab_test topology_test)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/offload/src)
endforeach()

if(BALLAST_SANITIZE MATCHES "thread")
  set_source_files_properties(contract/outer_loop.cc PROPERTIES COMPILE_OPTIONS -fno-sanitize=thread)
  # Must be reported: proves that the suppressions hide nothing in a loop body of ours.
  add_executable(cpu_pool_race_canary contract/cpu_pool_race_canary.cc)
  target_link_libraries(cpu_pool_race_canary PRIVATE ballast::offload TBB::tbb ballast_build)
  add_test(NAME cpu_pool_race_canary COMMAND cpu_pool_race_canary)
  set_tests_properties(cpu_pool_race_canary PROPERTIES LABELS contract TIMEOUT 120
    ENVIRONMENT "${BALLAST_TEST_ENVIRONMENT}" PASS_REGULAR_EXPRESSION "WARNING: ThreadSanitizer: data race")
endif()
