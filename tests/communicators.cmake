# Tests of communicators: one contract over every kind, and the parts around them.
# SPDX-License-Identifier: Apache-2.0
ballast_add_test(in_process_communicator_test LABEL contract TIMEOUT 180
  SOURCES contract/in_process_communicator_test.cc stress/allocation_counter.cc
  LIBRARIES ballast::engine ballast::kernels ballast::offload)
