# Tests of io and base.
# SPDX-License-Identifier: Apache-2.0
ballast_add_test(storage_contract_test LABEL contract SOURCES contract/storage_contract_test.cc
                 LIBRARIES ballast::io ballast::io_testing)
ballast_add_test(chunk_store_test LABEL contract SOURCES contract/chunk_store_test.cc
                 LIBRARIES ballast::io ballast::io_testing)
