# Tests of the planner: closed forms against published figures, and the engine's own plan.
# SPDX-License-Identifier: Apache-2.0
add_executable(paper_cases planner/paper_cases.cc planner/predictions.cc)
target_link_libraries(paper_cases PRIVATE ballast_planner ballast_build)
target_include_directories(paper_cases PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
add_test(NAME paper_cases COMMAND paper_cases ${CMAKE_CURRENT_SOURCE_DIR}/data/paper-cases.csv)
# It must see what is wrong: a figure that is missed, and rows of every kind that nothing can be made of.
set(paper_odd ${CMAKE_CURRENT_SOURCE_DIR}/data/paper-cases-odd.csv)
add_test(NAME paper_cases_counts_odd_rows COMMAND paper_cases ${paper_odd})
set_tests_properties(paper_cases_counts_odd_rows PROPERTIES
  PASS_REGULAR_EXPRESSION "computed 5 hit 2 missed 3 not_computed 10")
add_test(NAME paper_cases_fails_on_a_miss COMMAND paper_cases ${paper_odd})
set_tests_properties(paper_cases_fails_on_a_miss PROPERTIES WILL_FAIL TRUE)
set_tests_properties(paper_cases paper_cases_counts_odd_rows paper_cases_fails_on_a_miss PROPERTIES
  LABELS unit TIMEOUT 300 ENVIRONMENT "${BALLAST_TEST_ENVIRONMENT}")
ballast_add_test(planner_test LABEL unit TIMEOUT 300
  SOURCES unit/planner_hardware_test.cc unit/planner_memory_test.cc unit/planner_rates_test.cc
          unit/planner_traffic_test.cc unit/run_plan_test.cc
  LIBRARIES ballast_planner)
target_compile_definitions(planner_test PRIVATE BALLAST_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
