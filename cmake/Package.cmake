# Packages for other machines: `cmake --build build/release --target package` writes a .deb for Debian 12 (and one
# with the headers) and a .tar.gz that runs from any folder. LibTorch is not in them: bin/halfstep is a launcher
# that finds it, docs/decisions/0076-packages-find-libtorch-at-start.md says how.
set(libexec libexec/halfstep)
install(PROGRAMS $<TARGET_FILE:halfstep_launcher> DESTINATION bin RENAME halfstep COMPONENT program EXCLUDE_FROM_ALL)
install(PROGRAMS $<TARGET_FILE:halfstep_cli> DESTINATION ${libexec} COMPONENT program EXCLUDE_FROM_ALL)
install(FILES $<TARGET_FILE:halfstep> DESTINATION lib COMPONENT program EXCLUDE_FROM_ALL)
install(FILES LICENSE DESTINATION share/doc/halfstep RENAME copyright COMPONENT program EXCLUDE_FROM_ALL)
install(FILES LICENSE DESTINATION share/doc/halfstep-dev RENAME copyright COMPONENT development EXCLUDE_FROM_ALL)
# Where Debian's zsh looks; others look into site-functions.
install(FILES ${texts}/_halfstep DESTINATION share/zsh/vendor-completions COMPONENT program EXCLUDE_FROM_ALL)

# Files are taken as they were linked: their run paths name the build and this machine's LibTorch, and they carry
# symbols that nobody needs.
install(CODE "
  set(prefix \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}\")
  file(RPATH_SET FILE \"\${prefix}/${libexec}/halfstep\" NEW_RPATH \"\\\$ORIGIN/../../lib\")
  file(RPATH_SET FILE \"\${prefix}/lib/$<TARGET_FILE_NAME:halfstep>\" NEW_RPATH \"\\\$ORIGIN\")
  execute_process(COMMAND \"${CMAKE_STRIP}\" --strip-unneeded \"\${prefix}/bin/halfstep\"
    \"\${prefix}/${libexec}/halfstep\" \"\${prefix}/lib/$<TARGET_FILE_NAME:halfstep>\" COMMAND_ERROR_IS_FATAL ANY)"
  COMPONENT program EXCLUDE_FROM_ALL)

set(CPACK_GENERATOR DEB TGZ)
set(CPACK_PACKAGE_NAME halfstep)
set(CPACK_PACKAGE_VENDOR Halfstep)
set(CPACK_PACKAGE_CONTACT "The Halfstep developers")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Mixed-precision training for LibTorch")
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_PACKAGE_FILE_NAME halfstep-${PROJECT_VERSION}-linux-${CMAKE_SYSTEM_PROCESSOR})
set(CPACK_PACKAGE_DIRECTORY ${CMAKE_BINARY_DIR}/packages)
set(CPACK_COMPONENTS_ALL program development)
set(CPACK_ARCHIVE_COMPONENT_INSTALL ON)
set(CPACK_PROJECT_CONFIG_FILE ${PROJECT_SOURCE_DIR}/cmake/PackageFormats.cmake)

set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_NAME halfstep)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${CMAKE_LIBRARY_OUTPUT_DIRECTORY} ${TORCH_INSTALL_PREFIX}/lib)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_RECOMMENDS "python3-venv, bash-completion")
set(CPACK_COMPONENT_PROGRAM_DESCRIPTION "The command halfstep and the shared library. Trains models in FP32,
BF16 and FP16 from one configuration, shows and logs what it does,
and resumes bit for bit. Needs LibTorch ${torch_minor_version} from the Python package
torch, which it finds by HALFSTEP_TORCH, an active virtual
environment, or python3.")
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME halfstep-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "halfstep (= ${PROJECT_VERSION})")
set(CPACK_COMPONENT_DEVELOPMENT_DESCRIPTION "Headers, for C++ programs: find_package(Halfstep), with a LibTorch ${torch_minor_version}
that the project names by Torch_DIR.")
include(CPack)
