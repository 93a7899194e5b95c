# The installed package, used by a foreign project: install into the build tree, then configure, build and run it there.
# Not under a sanitizer, whose flags are no part of the package.
# SPDX-License-Identifier: Apache-2.0
if(NOT BALLAST_INSTALL OR BALLAST_SANITIZE OR BALLAST_COVERAGE)
  return()
endif()

set(consumer_dir ${PROJECT_BINARY_DIR}/consumer)
add_test(NAME consumer_install
         COMMAND ${CMAKE_COMMAND} --install ${PROJECT_BINARY_DIR} --prefix ${consumer_dir}/prefix)
set_tests_properties(consumer_install PROPERTIES LABELS consumer FIXTURES_SETUP consumer_package TIMEOUT 120)

add_test(NAME consumer_builds_and_runs
         COMMAND ${CMAKE_CTEST_COMMAND} --build-and-test ${CMAKE_CURRENT_SOURCE_DIR}/consumer ${consumer_dir}/build
                 --build-generator ${CMAKE_GENERATOR}
                 --build-options -DCMAKE_PREFIX_PATH=${consumer_dir}/prefix -DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}
                                 -DCMAKE_BUILD_TYPE=Release
                 --test-command ${CMAKE_CTEST_COMMAND} --output-on-failure)
set_tests_properties(consumer_builds_and_runs PROPERTIES
  LABELS consumer FIXTURES_REQUIRED consumer_package TIMEOUT 900)
