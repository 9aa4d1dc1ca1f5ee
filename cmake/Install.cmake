# What `cmake --install` puts where: the library, the command, its manual and completions, the headers, and the
# files that find_package(Halfstep) reads. Components say which of it cmake/Package.cmake takes:
#   here         for this machine only: knows the LibTorch that it was built against by its path
#   program      what the package `halfstep` has; rules with EXCLUDE_FROM_ALL are for packages only
#   development  what the package `halfstep-dev` has
#   wheel        what cmake/Wheel.cmake puts into the Python package
include(CMakePackageConfigHelpers)
set(cmake_files ${CMAKE_INSTALL_LIBDIR}/cmake/Halfstep)

install(TARGETS halfstep EXPORT HalfstepTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT here NAMELINK_COMPONENT development
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS halfstep_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT here)
install(DIRECTORY include/halfstep DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development)
install(EXPORT HalfstepTargets NAMESPACE Halfstep:: DESTINATION ${cmake_files} COMPONENT development)

configure_package_config_file(cmake/HalfstepConfig.cmake.in HalfstepConfig.cmake INSTALL_DESTINATION ${cmake_files})
write_basic_package_version_file(HalfstepConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/HalfstepConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/HalfstepConfigVersion.cmake
  DESTINATION ${cmake_files} COMPONENT development)
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/HalfstepBuiltWith.cmake "set(Halfstep_BUILT_WITH_TORCH \"${Torch_DIR}\")\n")
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/HalfstepBuiltWith.cmake DESTINATION ${cmake_files} COMPONENT here)

# The program writes its own manual and completions. One built with a sanitizer is not for installing.
if(HALFSTEP_SANITIZE)
  return()
endif()
set(texts ${CMAKE_BINARY_DIR}/texts)
file(MAKE_DIRECTORY ${texts})
add_custom_command(OUTPUT ${texts}/halfstep.1 ${texts}/halfstep ${texts}/_halfstep ${texts}/halfstep.fish
  COMMAND halfstep_cli manual > halfstep.1
  COMMAND halfstep_cli completion bash > halfstep
  COMMAND halfstep_cli completion zsh > _halfstep
  COMMAND halfstep_cli completion fish > halfstep.fish
  DEPENDS halfstep_cli WORKING_DIRECTORY ${texts} COMMENT "Manual and completions of halfstep" VERBATIM)
add_custom_target(halfstep_texts ALL DEPENDS ${texts}/halfstep.1)
# All that `cmake --install` takes, for those who build no tests.
add_custom_target(installable DEPENDS halfstep_cli halfstep_texts)

install(FILES ${texts}/halfstep.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT program)
install(FILES ${texts}/halfstep DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions COMPONENT program)
install(FILES ${texts}/_halfstep DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions COMPONENT program)
install(FILES ${texts}/halfstep.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d COMPONENT program)

include(cmake/Package.cmake)
include(cmake/Wheel.cmake)
