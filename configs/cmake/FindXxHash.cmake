# Defines XxHash::XxHash, found through pkg-config.
# SPDX-License-Identifier: Apache-2.0
find_package(PkgConfig QUIET)
if(PkgConfig_FOUND)
  pkg_check_modules(PC_XXHASH QUIET libxxhash)
endif()
find_path(XxHash_INCLUDE_DIR xxhash.h HINTS ${PC_XXHASH_INCLUDE_DIRS})
find_library(XxHash_LIBRARY xxhash HINTS ${PC_XXHASH_LIBRARY_DIRS})
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(XxHash REQUIRED_VARS XxHash_LIBRARY XxHash_INCLUDE_DIR
                                  VERSION_VAR PC_XXHASH_VERSION)
if(XxHash_FOUND AND NOT TARGET XxHash::XxHash)
  add_library(XxHash::XxHash UNKNOWN IMPORTED)
  set_target_properties(XxHash::XxHash PROPERTIES IMPORTED_LOCATION "${XxHash_LIBRARY}"
                        INTERFACE_INCLUDE_DIRECTORIES "${XxHash_INCLUDE_DIR}")
endif()
mark_as_advanced(XxHash_INCLUDE_DIR XxHash_LIBRARY)
