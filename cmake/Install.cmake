# Installs the library, the command, the headers and the files that find_package(Halfstep) reads.
include(CMakePackageConfigHelpers)

install(TARGETS halfstep EXPORT HalfstepTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS halfstep_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY include/halfstep DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT HalfstepTargets NAMESPACE Halfstep:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Halfstep)

configure_package_config_file(cmake/HalfstepConfig.cmake.in HalfstepConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Halfstep)
write_basic_package_version_file(HalfstepConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/HalfstepConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/HalfstepConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/Halfstep)
