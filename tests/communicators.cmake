# Tests of communicators: one contract over every kind, and the parts around them.
# SPDX-License-Identifier: Apache-2.0
ballast_add_test(in_process_communicator_test LABEL contract TIMEOUT 180
  SOURCES contract/in_process_communicator_test.cc stress/allocation_counter.cc
  LIBRARIES ballast::engine ballast::kernels ballast::offload)
ballast_add_test(bootstrap_test LABEL unit TIMEOUT 60 SOURCES unit/bootstrap_test.cc LIBRARIES ballast::engine)

if(NOT TARGET ballast_mpi)
  message(STATUS "Tests of communicators over MPI: left out, as the library is")
  return()
endif()

# One program, one rank. MPI keeps memory until its end and past it, so the leak checker is not asked about it.
add_executable(mpi_communicator_test contract/mpi_communicator_test.cc)
target_link_libraries(mpi_communicator_test PRIVATE ballast::mpi ballast::offload ballast::kernels GTest::gmock
                      GTest::gtest ballast_build)
target_include_directories(mpi_communicator_test PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
set(ballast_mpi_environment "ASAN_OPTIONS=detect_leaks=0" ${BALLAST_TEST_ENVIRONMENT})

if(NOT MPIEXEC_EXECUTABLE)
  # A test that says what is missing, and counts as skipped.
  add_test(NAME mpi_communicator_test COMMAND ${CMAKE_COMMAND} -E echo "no mpirun was found (openmpi-bin)")
  set_tests_properties(mpi_communicator_test PROPERTIES SKIP_REGULAR_EXPRESSION "no mpirun was found")
  return()
endif()

foreach(ranks 1 2 3 4)
  set(name mpi_communicator_test_${ranks})
  add_test(NAME ${name} COMMAND ${MPIEXEC_EXECUTABLE} --allow-run-as-root --oversubscribe --bind-to none
                                -n ${ranks} $<TARGET_FILE:mpi_communicator_test>)
  # Ranks share the cores with whatever else runs, so other tests wait.
  set_tests_properties(${name} PROPERTIES LABELS contract TIMEOUT 180 PROCESSORS 2
                       ENVIRONMENT "${ballast_mpi_environment}")
endforeach()

add_executable(mpi_failure_worker integration/mpi_failure_worker.cc)
target_link_libraries(mpi_failure_worker PRIVATE ballast::mpi ballast::offload ballast_build)
ballast_add_test(mpi_failure_test LABEL integration TIMEOUT 300 SOURCES integration/mpi_failure_test.cc
  LIBRARIES ballast::base)
target_compile_definitions(mpi_failure_test PRIVATE MPIRUN="${MPIEXEC_EXECUTABLE}"
                                                    WORKER="$<TARGET_FILE:mpi_failure_worker>")
add_dependencies(mpi_failure_test mpi_failure_worker)
set_tests_properties(mpi_failure_test PROPERTIES PROCESSORS 2 ENVIRONMENT "${ballast_mpi_environment}")
