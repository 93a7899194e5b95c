# Tests of the reference trainer.
# SPDX-License-Identifier: Apache-2.0
if(TARGET ballast_gpt)
  find_package(dnnl REQUIRED)
  ballast_add_test(gpt_model_test LABEL unit SOURCES unit/gpt_model_test.cc LIBRARIES ballast_gpt)
  target_compile_definitions(gpt_model_test PRIVATE BALLAST_MODELS="${PROJECT_SOURCE_DIR}/configs/models")
  ballast_add_test(gpt_rows_test LABEL unit SOURCES unit/gpt_rows_test.cc LIBRARIES ballast_gpt)
  ballast_add_test(gpt_matmul_test LABEL unit SOURCES unit/gpt_matmul_test.cc LIBRARIES ballast_gpt DNNL::dnnl)
  ballast_add_test(gpt_math_test LABEL unit SOURCES unit/gpt_math_test.cc LIBRARIES ballast_gpt DNNL::dnnl)
  ballast_add_test(gpt_trainer_test LABEL integration SOURCES unit/gpt_trainer_test.cc LIBRARIES ballast_gpt DNNL::dnnl)
  ballast_add_test(gpt_ranks_test LABEL integration TIMEOUT 300 SOURCES integration/gpt_ranks_test.cc
    LIBRARIES ballast_gpt ballast::engine)
  # The same mathematics where the CPU has less: wider types and narrower vectors.
  foreach(instructions AVX2 SSE41)
    foreach(part rows matmul math)
      add_test(NAME gpt_${part}_test_${instructions} COMMAND gpt_${part}_test)
      set_tests_properties(gpt_${part}_test_${instructions} PROPERTIES LABELS unit TIMEOUT 600
                           ENVIRONMENT "ONEDNN_MAX_CPU_ISA=${instructions};${BALLAST_TEST_ENVIRONMENT}")
    endforeach()
  endforeach()
endif()
