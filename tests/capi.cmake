# The C interface, from a program in C.
# SPDX-License-Identifier: Apache-2.0
enable_language(C)
add_executable(c_api_test integration/c_api_test.c integration/c_api_errors.cc)
set_target_properties(c_api_test PROPERTIES C_STANDARD 11 C_STANDARD_REQUIRED ON C_EXTENSIONS OFF)
target_compile_options(c_api_test PRIVATE -Wall -Wextra -Wpedantic)
target_link_libraries(c_api_test PRIVATE ballast::engine m)
add_test(NAME c_api_test COMMAND c_api_test)
set_tests_properties(c_api_test PROPERTIES LABELS integration TIMEOUT 120 ENVIRONMENT "${BALLAST_TEST_ENVIRONMENT}")
