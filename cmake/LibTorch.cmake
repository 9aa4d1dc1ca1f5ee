# Finds LibTorch 2.13. Asked for in this order: -DTorch_DIR or CMAKE_PREFIX_PATH, the wheel in .venv
# (made by tools/setup), the wheel of the python3 on PATH; where pip builds us, first that of its Python.
if(NOT Torch_DIR)
  foreach(python ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/.venv/bin/python python3)
    execute_process(
      COMMAND ${python} -c "import torch; print(torch.utils.cmake_prefix_path)"
      OUTPUT_VARIABLE torch_of_python OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
    if(NOT failed)
      break()
    endif()
  endforeach()
endif()

# LibTorch's package for a build with CUDA asks for CUDA's compiler, headers and libraries. Halfstep compiles no CUDA code:
# the target is made here instead, of LibTorch's own libraries.
set(torch_of_wheel ${Torch_DIR})
if(NOT torch_of_wheel)
  set(torch_of_wheel ${torch_of_python}/Torch)
endif()
cmake_path(GET torch_of_wheel PARENT_PATH torch_cmake_folder)
file(REAL_PATH "${torch_cmake_folder}/../.." torch_root)
if(EXISTS "${torch_root}/lib/libtorch_cuda.so")
  include("${torch_of_wheel}/TorchConfigVersion.cmake")
  set(Torch_VERSION ${PACKAGE_VERSION})
  set(Torch_DIR ${torch_of_wheel})
  set(TORCH_INSTALL_PREFIX ${torch_root})
  set(Torch_FOUND TRUE)
  add_library(torch INTERFACE IMPORTED)
  target_include_directories(torch SYSTEM INTERFACE ${torch_root}/include ${torch_root}/include/torch/csrc/api/include)
  target_compile_definitions(torch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO USE_RPC USE_TENSORPIPE)
  # torch_cuda is named by nobody and registers its kernels by being there.
  target_link_libraries(torch INTERFACE -Wl,--push-state,--no-as-needed ${torch_root}/lib/libtorch_cuda.so
    ${torch_root}/lib/libtorch.so -Wl,--pop-state ${torch_root}/lib/libtorch_cpu.so ${torch_root}/lib/libc10.so)
  # What these need lies in other wheels, and they know where; a linker does not ask them.
  target_link_options(torch INTERFACE -Wl,--allow-shlib-undefined)
  # For ranks on CUDA devices, LibTorch's header of NCCL asks for NCCL's and CUDA's. Wheels have them, but for some that
  # come with CUDA's compiler.
  cmake_path(GET torch_root PARENT_PATH torch_wheels)
  find_path(torch_nccl_include nccl.h HINTS ${torch_wheels}/nvidia/nccl/include)
  find_path(torch_cuda_include crt/host_config.h HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES include)
  find_path(torch_cusparse_include cusparse.h HINTS ${torch_wheels}/nvidia/cu13/include ${torch_cuda_include})
  if(torch_nccl_include AND torch_cuda_include AND torch_cusparse_include)
    set(torch_nccl_includes ${torch_nccl_include} ${torch_cuda_include} ${torch_cusparse_include})
  else()
    message(WARNING "LibTorch has CUDA, and nccl.h, cusparse.h or crt/host_config.h was not found: ranks exchange tensors "
      "of CUDA devices by way of the host. Set CUDA_HOME, or -Dtorch_nccl_include=<folder>.")
  endif()
endif()

# The wheel has kineto inside libtorch_cpu, yet LibTorch's package looks for it as a library of its own and
# warns. The answer given here keeps it from looking; we link the target `torch`, not that list of libraries.
set(kineto_LIBRARY torch_cpu)
if(NOT Torch_FOUND)
  find_package(Torch 2.13 QUIET HINTS ${torch_of_python})
endif()

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
