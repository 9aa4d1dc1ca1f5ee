# What the wheel has, below the Python package `halfstep`: tools/make_wheel. LibTorch is in the package beside it.
set(wheel_cmake_files lib/cmake/Halfstep)
install(PROGRAMS $<TARGET_FILE:halfstep_cli> DESTINATION bin COMPONENT wheel EXCLUDE_FROM_ALL)
install(PROGRAMS $<TARGET_FILE:halfstep> DESTINATION lib COMPONENT wheel EXCLUDE_FROM_ALL)
install(DIRECTORY include/halfstep DESTINATION include COMPONENT wheel EXCLUDE_FROM_ALL)
install(EXPORT HalfstepTargets NAMESPACE Halfstep:: DESTINATION ${wheel_cmake_files} COMPONENT wheel EXCLUDE_FROM_ALL)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/HalfstepConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/HalfstepConfigVersion.cmake
  DESTINATION ${wheel_cmake_files} COMPONENT wheel EXCLUDE_FROM_ALL)
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/wheel/HalfstepBuiltWith.cmake
  "set(Halfstep_BUILT_WITH_TORCH \"\${CMAKE_CURRENT_LIST_DIR}/../../../../torch/share/cmake/Torch\")\n")
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/wheel/HalfstepBuiltWith.cmake DESTINATION ${wheel_cmake_files}
  COMPONENT wheel EXCLUDE_FROM_ALL)
install(CODE "
  set(prefix \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}\")
  file(RPATH_SET FILE \"\${prefix}/bin/halfstep\" NEW_RPATH \"\\\$ORIGIN/../lib:\\\$ORIGIN/../../torch/lib\")
  file(RPATH_SET FILE \"\${prefix}/lib/$<TARGET_FILE_NAME:halfstep>\" NEW_RPATH \"\\\$ORIGIN:\\\$ORIGIN/../../torch/lib\")
  execute_process(COMMAND \"${CMAKE_STRIP}\" --strip-unneeded \"\${prefix}/bin/halfstep\"
    \"\${prefix}/lib/$<TARGET_FILE_NAME:halfstep>\" COMMAND_ERROR_IS_FATAL ANY)"
  COMPONENT wheel EXCLUDE_FROM_ALL)
