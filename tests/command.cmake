# Tests of the configuration and of the command.
# SPDX-License-Identifier: Apache-2.0
ballast_add_test(config_test LABEL unit
  SOURCES unit/config_test.cc unit/config_fuzz_test.cc
  LIBRARIES ballast_engine)
target_compile_definitions(config_test PRIVATE BALLAST_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
