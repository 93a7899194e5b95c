# Install rules and the package file: find_package(ballast 0.1) then gives ballast::engine and what it stands on, and
# find_package(ballast 0.1 COMPONENTS mpi cuda nccl) ballast::mpi, ballast::cuda and ballast::nccl besides.
# SPDX-License-Identifier: Apache-2.0
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(ballast_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/ballast)
foreach(target ballast_base ballast_io ballast_kernels ballast_offload ballast_schedule ballast_engine)
  # Sets of headers must be named where a target has them; each of ours has the one.
  if(TARGET ${target})
    install(TARGETS ${target} EXPORT ballastTargets
            ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
            FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  endif()
endforeach()
install(EXPORT ballastTargets NAMESPACE ballast:: DESTINATION ${ballast_package_dir})
# A component of its own, so that only who asks for it needs MPI.
if(TARGET ballast_mpi)
  install(TARGETS ballast_mpi EXPORT ballastMpiTargets
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
          FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT ballastMpiTargets NAMESPACE ballast:: DESTINATION ${ballast_package_dir})
endif()
# The same for CUDA and for NCCL.
if(TARGET ballast_cuda)
  install(TARGETS ballast_kernels_cuda ballast_cuda EXPORT ballastCudaTargets
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
          FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT ballastCudaTargets NAMESPACE ballast:: DESTINATION ${ballast_package_dir})
endif()
if(TARGET ballast_nccl)
  install(TARGETS ballast_nccl EXPORT ballastNcclTargets
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
          FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT ballastNcclTargets NAMESPACE ballast:: DESTINATION ${ballast_package_dir})
  install(FILES ${PROJECT_SOURCE_DIR}/configs/cmake/FindNCCL.cmake DESTINATION ${ballast_package_dir})
endif()

configure_package_config_file(${PROJECT_SOURCE_DIR}/configs/cmake/ballastConfig.cmake.in
                              ${PROJECT_BINARY_DIR}/ballastConfig.cmake INSTALL_DESTINATION ${ballast_package_dir})
# Before 1.0 a minor version may break what the last one promised.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/ballastConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/ballastConfig.cmake ${PROJECT_BINARY_DIR}/ballastConfigVersion.cmake
              ${PROJECT_SOURCE_DIR}/configs/cmake/FindHwloc.cmake
              ${PROJECT_SOURCE_DIR}/configs/cmake/FindLibUring.cmake
              ${PROJECT_SOURCE_DIR}/configs/cmake/FindXxHash.cmake
        DESTINATION ${ballast_package_dir})
if(TARGET ballast)
  install(TARGETS ballast RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
