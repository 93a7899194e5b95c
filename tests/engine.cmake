# Tests of the engine over the public API.
# SPDX-License-Identifier: Apache-2.0
ballast_add_test(trajectory_test LABEL integration SOURCES integration/trajectory_test.cc LIBRARIES ballast::engine)
ballast_add_test(engine_failure_test LABEL integration SOURCES integration/engine_failure_test.cc
  LIBRARIES ballast::engine ballast_io_testing ballast_io ballast_offload ballast_schedule)
target_include_directories(engine_failure_test PRIVATE ${PROJECT_SOURCE_DIR}/engine/src)
ballast_add_test(engine_misuse_test LABEL integration TIMEOUT 300 SOURCES integration/engine_misuse_test.cc
  LIBRARIES ballast::engine ballast_io_testing ballast_io ballast_offload ballast_schedule)
target_include_directories(engine_misuse_test PRIVATE ${PROJECT_SOURCE_DIR}/engine/src)
ballast_add_test(nvme_states_test LABEL integration TIMEOUT 300 SOURCES integration/nvme_states_test.cc
  LIBRARIES ballast::engine)
ballast_add_test(engine_values_test LABEL integration TIMEOUT 300 SOURCES integration/engine_values_test.cc
  LIBRARIES ballast::engine)
ballast_add_test(engine_deviation_test LABEL integration TIMEOUT 300 SOURCES integration/engine_deviation_test.cc
  LIBRARIES ballast::engine)
ballast_add_test(engine_matrix_test LABEL integration TIMEOUT 600 SOURCES integration/engine_matrix_test.cc
  LIBRARIES ballast::engine ballast_io_testing ballast_io ballast_offload ballast_schedule)
target_include_directories(engine_matrix_test PRIVATE ${PROJECT_SOURCE_DIR}/engine/src)

# These look behind the public headers.
ballast_add_test(engine_parts_test LABEL unit TIMEOUT 120
  SOURCES unit/layout_test.cc unit/plan_test.cc unit/trace_test.cc unit/loss_scaler_test.cc
  LIBRARIES ballast::engine ballast::kernels ballast::schedule)
target_include_directories(engine_parts_test PRIVATE ${PROJECT_SOURCE_DIR}/engine/src)

ballast_add_test(engine_stress_test LABEL stress TIMEOUT 600 SOURCES stress/engine_stress_test.cc
  stress/allocation_counter.cc
  LIBRARIES ballast::engine ballast_io_testing ballast_io ballast_offload ballast_schedule)
target_include_directories(engine_stress_test PRIVATE ${PROJECT_SOURCE_DIR}/engine/src)
ballast_add_test(unit_communicators_test LABEL integration TIMEOUT 600
  SOURCES integration/unit_communicators_test.cc integration/unit_communicators_failure_test.cc
  integration/other_engines_test.cc
  LIBRARIES ballast::engine ballast_io_testing ballast_io ballast_offload ballast_schedule)
target_include_directories(unit_communicators_test PRIVATE ${PROJECT_SOURCE_DIR}/engine/src)
ballast_add_test(ranks_test LABEL integration TIMEOUT 900 SOURCES integration/ranks_test.cc
  LIBRARIES ballast::engine ballast_io_testing ballast_io ballast_offload ballast_schedule)
target_include_directories(ranks_test PRIVATE ${PROJECT_SOURCE_DIR}/engine/src)
ballast_add_test(plan_peaks_test LABEL integration TIMEOUT 300 SOURCES integration/plan_peaks_test.cc
  LIBRARIES ballast::engine)
ballast_add_test(ranks_files_test LABEL integration TIMEOUT 600
  SOURCES integration/ranks_files_test.cc integration/ranks_order_test.cc integration/resume_names_test.cc
  LIBRARIES ballast::engine ballast_io_testing ballast_io ballast_offload ballast_schedule)
target_include_directories(ranks_files_test PRIVATE ${PROJECT_SOURCE_DIR}/engine/src)
ballast_add_test(crash_test LABEL stress TIMEOUT 1800 SOURCES stress/crash_test.cc
  LIBRARIES ballast::engine ballast_io_testing ballast_io ballast_offload ballast_schedule)
target_include_directories(crash_test PRIVATE ${PROJECT_SOURCE_DIR}/engine/src)
ballast_add_test(durability_test LABEL integration TIMEOUT 600 SOURCES integration/durability_test.cc
  LIBRARIES ballast::engine ballast_io)
target_include_directories(durability_test PRIVATE ${PROJECT_SOURCE_DIR}/engine/src)
ballast_add_test(resume_test LABEL integration TIMEOUT 600
  SOURCES integration/resume_test.cc integration/resume_matrix_test.cc integration/resume_interrupted_test.cc
  LIBRARIES ballast::engine)
ballast_add_test(moments_test LABEL integration TIMEOUT 300 SOURCES integration/moments_test.cc
  LIBRARIES ballast::engine)
ballast_add_test(checkpoint_writers_test LABEL integration TIMEOUT 300 SOURCES integration/checkpoint_writers_test.cc
  LIBRARIES ballast::engine ballast_io_testing ballast_io ballast_offload ballast_schedule)
target_include_directories(checkpoint_writers_test PRIVATE ${PROJECT_SOURCE_DIR}/engine/src)
ballast_add_test(safetensors_files_test LABEL integration TIMEOUT 300 SOURCES integration/safetensors_files_test.cc
  LIBRARIES ballast::engine)
ballast_add_test(checkpoint_save_test LABEL integration TIMEOUT 600 SOURCES integration/checkpoint_save_test.cc
  LIBRARIES ballast::engine ballast_io_testing ballast_io ballast_offload ballast_schedule)
target_include_directories(checkpoint_save_test PRIVATE ${PROJECT_SOURCE_DIR}/engine/src)
ballast_add_test(durable_faults_test LABEL integration TIMEOUT 600 SOURCES integration/durable_faults_test.cc
  LIBRARIES ballast::engine ballast_io)
ballast_add_test(manifest_test LABEL unit TIMEOUT 120 SOURCES unit/manifest_test.cc unit/held_step_test.cc
  stress/allocation_counter.cc
  LIBRARIES ballast::engine ballast_io ballast_offload)
target_include_directories(manifest_test PRIVATE ${PROJECT_SOURCE_DIR}/engine/src)
ballast_add_test(safetensors_test LABEL unit TIMEOUT 120 SOURCES unit/safetensors_test.cc LIBRARIES ballast::engine)
target_include_directories(safetensors_test PRIVATE ${PROJECT_SOURCE_DIR}/engine/src)
ballast_add_test(safetensors_fuzz_test LABEL stress TIMEOUT 600 SOURCES stress/safetensors_fuzz_test.cc
  LIBRARIES ballast::engine ballast_io ballast_offload)
target_include_directories(safetensors_fuzz_test PRIVATE ${PROJECT_SOURCE_DIR}/engine/src)
ballast_add_test(checkpoint_files_test LABEL integration TIMEOUT 300 SOURCES integration/checkpoint_files_test.cc
  LIBRARIES ballast::engine)
