# Tests of the configuration, of the command, and of the source tree's own rules.
# SPDX-License-Identifier: Apache-2.0
find_package(nlohmann_json 3.11 REQUIRED)

ballast_add_test(config_test LABEL unit TIMEOUT 120
  SOURCES unit/config_test.cc unit/config_fuzz_test.cc
  LIBRARIES ballast_engine)
target_compile_definitions(config_test PRIVATE BALLAST_SOURCE_DIR="${PROJECT_SOURCE_DIR}")

ballast_add_test(deepspeed_test LABEL unit TIMEOUT 120
  SOURCES unit/deepspeed_test.cc unit/learning_rate_test.cc LIBRARIES ballast_engine)
target_compile_definitions(deepspeed_test PRIVATE BALLAST_SOURCE_DIR="${PROJECT_SOURCE_DIR}")

set(command_parts ${PROJECT_SOURCE_DIR}/bench/cli)
ballast_add_test(command_parts_test LABEL unit TIMEOUT 120
  SOURCES unit/command_parts_test.cc integration/command_runner.cc
          ${command_parts}/display.cc ${command_parts}/interrupt.cc ${command_parts}/output_file.cc
          ${command_parts}/run_record.cc ${command_parts}/storage_bench.cc
  LIBRARIES ballast_engine ballast_io ballast_offload nlohmann_json::nlohmann_json)
target_include_directories(command_parts_test PRIVATE ${PROJECT_SOURCE_DIR}/bench)
target_compile_definitions(command_parts_test PRIVATE BALLAST_SOURCE_DIR="${PROJECT_SOURCE_DIR}" BALLAST_COMMAND="")

ballast_add_test(tune_test LABEL unit TIMEOUT 120 SOURCES unit/tune_test.cc ${command_parts}/tune_search.cc
  LIBRARIES ballast_base)
target_include_directories(tune_test PRIVATE ${PROJECT_SOURCE_DIR}/bench)
ballast_add_test(report_test LABEL unit TIMEOUT 120 SOURCES unit/report_test.cc LIBRARIES ballast_report)

if(TARGET ballast)
  # In a real browser, where one is installed.
  add_test(NAME report_in_browser
           COMMAND ${PROJECT_SOURCE_DIR}/tests/integration/report_in_browser $<TARGET_FILE:ballast>)
  set_tests_properties(report_in_browser PROPERTIES LABELS integration TIMEOUT 600 SKIP_RETURN_CODE 77)
  foreach(name command_checkpoint_test command_data_test command_deepspeed_test command_plan_test command_report_test
               command_refusals_test command_train_test command_tune_test)
    ballast_add_test(${name} LABEL integration TIMEOUT 600
      SOURCES integration/${name}.cc integration/command_runner.cc LIBRARIES nlohmann_json::nlohmann_json)
    target_compile_features(${name} PRIVATE cxx_std_20)
    target_compile_definitions(${name} PRIVATE BALLAST_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
                                               BALLAST_COMMAND="$<TARGET_FILE:ballast>")
    add_dependencies(${name} ballast)
  endforeach()
  if(TARGET ballast_mpi)
    ballast_add_test(command_ranks_test LABEL integration TIMEOUT 900
      SOURCES integration/command_ranks_test.cc integration/command_runner.cc
      LIBRARIES ballast_gpt ballast::engine nlohmann_json::nlohmann_json)
    target_compile_features(command_ranks_test PRIVATE cxx_std_20)
    target_compile_definitions(command_ranks_test PRIVATE BALLAST_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
                                                          BALLAST_COMMAND="$<TARGET_FILE:ballast>")
    add_dependencies(command_ranks_test ballast)
    set_tests_properties(command_ranks_test PROPERTIES PROCESSORS 2 ENVIRONMENT "${ballast_mpi_environment}")
    # A short part of what `tests/stress/run --minutes 30` does.
    add_test(NAME ranks_stress COMMAND ${PROJECT_SOURCE_DIR}/tests/stress/run --minutes 0.3 --seed 1 --timeout 20
                                       --build $<TARGET_FILE_DIR:ballast>)
    # And of what `tests/stress/kill --kills 200` does.
    add_test(NAME kill_stress COMMAND ${PROJECT_SOURCE_DIR}/tests/stress/kill --kills 6 --seed 1
                                      --build $<TARGET_FILE_DIR:ballast>)
    set_tests_properties(kill_stress PROPERTIES LABELS stress TIMEOUT 900 PROCESSORS 2
                         ENVIRONMENT "${ballast_mpi_environment}")
    set_tests_properties(ranks_stress PROPERTIES LABELS stress TIMEOUT 600 PROCESSORS 2
                         ENVIRONMENT "${ballast_mpi_environment}")
  endif()
endif()

add_test(NAME source_rules
         COMMAND ${PROJECT_SOURCE_DIR}/tests/tidy ${PROJECT_BINARY_DIR}/compile_commands.json)
set_tests_properties(source_rules PROPERTIES LABELS tidy TIMEOUT 120)
