# Finds LibTorch 2.13. Asked for in this order: -DTorch_DIR or CMAKE_PREFIX_PATH, the wheel in .venv
# (made by tools/setup), the wheel of the python3 on PATH.
if(NOT Torch_DIR)
  foreach(python ${PROJECT_SOURCE_DIR}/.venv/bin/python python3)
    execute_process(
      COMMAND ${python} -c "import torch; print(torch.utils.cmake_prefix_path)"
      OUTPUT_VARIABLE torch_of_python OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
    if(NOT failed)
      break()
    endif()
  endforeach()
endif()

# The wheel has kineto inside libtorch_cpu, yet LibTorch's package looks for it as a library of its own and
# warns. The answer given here keeps it from looking; we link the target `torch`, not that list of libraries.
set(kineto_LIBRARY torch_cpu)
find_package(Torch 2.13 QUIET HINTS ${torch_of_python})

string(CONCAT torch_advice "Run tools/setup, which puts LibTorch 2.13 into .venv, or configure with "
  "-DTorch_DIR=<the folder share/cmake/Torch of a LibTorch 2.13>.")
if(NOT Torch_FOUND)
  message(FATAL_ERROR "Halfstep needs LibTorch 2.13 and found none. ${torch_advice}")
elseif(NOT Torch_VERSION MATCHES "^2\\.13\\.")  # LibTorch's package also answers to requests for older ones
  message(FATAL_ERROR
    "Halfstep needs LibTorch 2.13 and found ${Torch_VERSION} in ${Torch_DIR}. ${torch_advice}")
endif()
string(REGEX MATCH "^[0-9]+\\.[0-9]+" torch_minor_version ${Torch_VERSION})
message(STATUS "LibTorch ${Torch_VERSION} at ${TORCH_INSTALL_PREFIX}")

# The Python whose torch and ml_dtypes the tests ask: the one that tools/setup made, unless told otherwise.
set(HALFSTEP_PYTHON ${PROJECT_SOURCE_DIR}/.venv/bin/python CACHE FILEPATH "Python with torch, numpy, ml_dtypes")
if(HALFSTEP_DEVELOPER AND NOT EXISTS ${HALFSTEP_PYTHON})
  message(WARNING "No Python at ${HALFSTEP_PYTHON}: tests that ask torch, numpy or ml_dtypes will fail. "
    "Run tools/setup, or configure with -DHALFSTEP_PYTHON=<a Python with tools/requirements.txt installed>.")
endif()
