# halfstep_test(NAME ROOM <room> COST <fast|slow> [TORCH|ENGINE] [LABELS ...] SOURCES ...)
#   One program a room and cost; ctest labels: the room, the cost, and "torch" for those that load LibTorch;
#   LABELS are further ones.
#   ENGINE links LibTorch without libhalfstep, to ask the engine as it is without us.
# halfstep_check(NAME ROOM <room> COST <fast|slow> [TORCH] [TIMED] [LABELS ...] COMMAND ...)
#   Any other command as a test, with the same labels. TIMED: it compares times, and runs by itself.
# Under the sanitizers (preset asan): the label "sanitize" and the target "sanitized_tests" are every test that does not
# load LibTorch, and run in CI; "sanitize_torch" and "sanitized_torch_tests" are the fast ones of the rooms whose
# mistakes would cost a training run: a command of their own, because they take as long as all the rest of CI.
find_package(GTest REQUIRED)
find_package(CLI11 REQUIRED)
find_package(nlohmann_json REQUIRED)

add_custom_target(sanitized_tests)
add_custom_target(sanitized_torch_tests)

# No check for globals defined twice: a test may compile a source into itself that the library hides, and then
# both have its globals. Leaks are looked for; LibTorch 2.13 gives no false ones.
set(halfstep_test_environment
    "HALFSTEP_PYTHON=${HALFSTEP_PYTHON}"
    "UBSAN_OPTIONS=print_stacktrace=1"
    "ASAN_OPTIONS=detect_odr_violation=0")

# The precompiled header of tests/CMakeLists.txt, and the options that it was made with. Eight files are compiled as one:
# half the time of a file goes into templates of torch.h. What a test compiles in from the library stays alone.
function(halfstep_use_torch_pch target)
  target_compile_options(${target} PRIVATE -O1)
  target_precompile_headers(${target} REUSE_FROM halfstep_torch_pch)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "^${PROJECT_SOURCE_DIR}/src/")
  set_source_files_properties(${sources} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()

# The same for programs that know no Torch: GoogleTest and nlohmann-json are most of what a file of theirs costs.
function(halfstep_use_plain_pch target)
  target_compile_options(${target} PRIVATE -O1)
  target_precompile_headers(${target} REUSE_FROM halfstep_plain_pch)
endfunction()

# Labels a test; `program` is built for the asan run when it is a target of ours.
function(halfstep_label_test name room cost torch program)
  set(labels ${room} ${cost} ${ARGN})
  if(torch)
    list(APPEND labels torch)
  endif()
  set(sanitize "")
  if(NOT torch)
    set(sanitize sanitize)
  elseif(room MATCHES "^(memory|scaling|optim|checkpoint|data|ops|autocast|nn|train)$" AND cost STREQUAL "fast")
    set(sanitize sanitize_torch)
  endif()
  if(sanitize)
    list(APPEND labels ${sanitize})
    if(TARGET ${program})
      string(REPLACE sanitize sanitized suite ${sanitize})
      add_dependencies(${suite}_tests ${program})
    endif()
  endif()
  set(environment ${halfstep_test_environment})
  if(torch)
    # Two run at a time, and LibTorch's threads would hold the other's core for 13 ms while they wait:
    # docs/decisions/0067-threads-spin-briefly.md.
    list(APPEND environment "GOMP_SPINCOUNT=10000")
  endif()
  set_tests_properties(${name} PROPERTIES LABELS "${labels}" ENVIRONMENT "${environment}" TIMEOUT 1500)
endfunction()

function(halfstep_test name)
  cmake_parse_arguments(arg "TORCH;ENGINE" "ROOM;COST" "SOURCES;LABELS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${name} PRIVATE GTest::gtest_main $<IF:$<BOOL:${arg_TORCH}>,halfstep,halfstep_files>)
  if(arg_TORCH OR arg_ENGINE)
    set(uses_torch TRUE)
    target_link_libraries(${name} PRIVATE torch)
    halfstep_use_torch_pch(${name})
  else()
    set(uses_torch FALSE)
    halfstep_use_plain_pch(${name})
  endif()
  add_test(NAME ${name} COMMAND ${name})
  halfstep_label_test(${name} ${arg_ROOM} ${arg_COST} ${uses_torch} ${name} ${arg_LABELS})
endfunction()

function(halfstep_check name)
  cmake_parse_arguments(arg "TORCH;TIMED" "ROOM;COST" "COMMAND;LABELS" ${ARGN})
  add_test(NAME ${name} COMMAND ${arg_COMMAND} COMMAND_EXPAND_LISTS)
  set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77)
  list(GET arg_COMMAND 0 program)
  halfstep_label_test(${name} ${arg_ROOM} ${arg_COST} ${arg_TORCH} ${program} ${arg_LABELS})
  if(arg_TIMED)
    # As users run it: LibTorch's threads wait as they do by themselves.
    set_tests_properties(${name} PROPERTIES RUN_SERIAL TRUE ENVIRONMENT "${halfstep_test_environment}")
  endif()
endfunction()
