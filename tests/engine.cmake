# Tests of the engine over the public API.
# SPDX-License-Identifier: Apache-2.0
ballast_add_test(trajectory_test LABEL integration SOURCES integration/trajectory_test.cc LIBRARIES ballast::engine)
