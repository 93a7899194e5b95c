# Tests of io and base.
# SPDX-License-Identifier: Apache-2.0
ballast_add_test(base_test LABEL unit SOURCES unit/size_test.cc unit/wake_event_test.cc LIBRARIES ballast::base)
ballast_add_test(storage_contract_test LABEL contract SOURCES contract/storage_contract_test.cc
                 LIBRARIES ballast::io ballast::io_testing)
ballast_add_test(chunk_store_test LABEL contract
                 SOURCES contract/chunk_store_test.cc contract/chunk_store_places_test.cc
                 LIBRARIES ballast::io ballast::io_testing)
ballast_add_test(storage_environment_test LABEL contract SOURCES contract/storage_environment_test.cc
                 LIBRARIES ballast::io)

find_package(XxHash REQUIRED)
# These look behind the public headers.
ballast_add_test(io_internals_test LABEL unit SOURCES unit/piece_queue_test.cc unit/chunk_file_header_test.cc
                 LIBRARIES ballast::io XxHash::XxHash)
ballast_add_test(storage_faults_test LABEL stress SOURCES stress/storage_faults_test.cc LIBRARIES ballast::io)
foreach(test io_internals_test storage_faults_test)
  target_include_directories(${test} PRIVATE ${PROJECT_SOURCE_DIR}/io/src)
endforeach()
