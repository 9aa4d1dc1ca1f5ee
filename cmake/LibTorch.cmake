# Finds LibTorch 2.13. Asked for in this order: -DTorch_DIR or CMAKE_PREFIX_PATH, the wheel in .venv
# (made by tools/setup), the wheel of the python3 on PATH.
if(NOT Torch_DIR AND NOT CMAKE_PREFIX_PATH)
  foreach(python ${PROJECT_SOURCE_DIR}/.venv/bin/python python3)
    execute_process(
      COMMAND ${python} -c "import torch; print(torch.utils.cmake_prefix_path)"
      OUTPUT_VARIABLE torch_prefix OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
    if(NOT failed)
      list(APPEND CMAKE_PREFIX_PATH ${torch_prefix})
      break()
    endif()
  endforeach()
endif()

find_package(Torch 2.13 QUIET)
if(NOT Torch_FOUND)
  message(FATAL_ERROR
    "Halfstep needs LibTorch 2.13 and found none. Run tools/setup, which puts it into .venv, or "
    "configure with -DCMAKE_PREFIX_PATH=<folder that holds share/cmake/Torch>.")
endif()
message(STATUS "LibTorch ${Torch_VERSION} at ${TORCH_INSTALL_PREFIX}")

# The Python whose torch and ml_dtypes the tests ask: the one that tools/setup made, unless told otherwise.
set(HALFSTEP_PYTHON ${PROJECT_SOURCE_DIR}/.venv/bin/python CACHE FILEPATH "Python with torch, numpy, ml_dtypes")
