# Options, compiler settings shared by all targets, and small helpers. Included once by the top-level file.
# SPDX-License-Identifier: Apache-2.0
option(BALLAST_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(BALLAST_BENCH "Build the command, the reference trainer and the benchmarks" ${PROJECT_IS_TOP_LEVEL})
option(BALLAST_INSTALL "Create the install rules" ${PROJECT_IS_TOP_LEVEL})
option(BALLAST_COVERAGE "Instrument for coverage (GCC)" OFF)
set(BALLAST_SANITIZE "" CACHE STRING "Sanitizers, such as address,undefined or thread")

if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_CXX_EXTENSIONS OFF)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
  endif()
endif()
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)

find_package(Threads REQUIRED)

# Warnings, contraction and instrumentation: private to our own targets, absent from the installed package.
add_library(ballast_build INTERFACE)
target_compile_options(ballast_build INTERFACE -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual
                                               -Wno-missing-field-initializers -ffp-contract=off)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC 12 sees overlapping copies inside std::string where there are none (its bug 105651), from -O3 on.
  target_compile_options(ballast_build INTERFACE -Wno-restrict)
endif()
if(BALLAST_SANITIZE)
  target_compile_options(ballast_build INTERFACE -fsanitize=${BALLAST_SANITIZE} -fno-sanitize-recover=all
                                                 -fno-omit-frame-pointer)
  target_link_options(ballast_build INTERFACE -fsanitize=${BALLAST_SANITIZE})
endif()
if(BALLAST_COVERAGE)
  target_compile_options(ballast_build INTERFACE --coverage)
  target_link_options(ballast_build INTERFACE --coverage)
endif()

# ballast_target(<target> <export name>): what every library of ours has in common.
function(ballast_target target export_name)
  add_library(ballast::${export_name} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${export_name})
  get_target_property(kind ${target} TYPE)
  if(kind STREQUAL "INTERFACE_LIBRARY")
    target_compile_features(${target} INTERFACE cxx_std_20)
  else()
    target_compile_features(${target} PUBLIC cxx_std_20)
    target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:ballast_build>)
  endif()
endfunction()
