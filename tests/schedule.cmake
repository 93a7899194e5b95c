# Tests of the scheduler: by hand, by exploration, by simulation.
# SPDX-License-Identifier: Apache-2.0
ballast_add_test(device_map_test LABEL unit
  SOURCES unit/device_map_test.cc unit/range_map_test.cc
  LIBRARIES ballast_schedule)
ballast_add_test(scheduler_test LABEL unit
  SOURCES unit/scheduler_test.cc unit/scheduler_eager_test.cc
  LIBRARIES ballast_schedule)
ballast_add_test(schedule_explorer_test LABEL simulation
  SOURCES simulation/explorer_test.cc
  LIBRARIES ballast_simulate)
ballast_add_test(schedule_property_test LABEL simulation
  SOURCES simulation/property_test.cc simulation/simulator_test.cc
  LIBRARIES ballast_simulate)
ballast_add_test(schedule_ranks_test LABEL simulation
  SOURCES simulation/rank_explorer_test.cc simulation/rank_property_test.cc simulation/scaling_test.cc
  LIBRARIES ballast_simulate)
