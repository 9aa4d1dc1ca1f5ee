# How every file of ours is compiled.

# No contraction: a fused multiply-add in one ISA's file and none in another's would give different bits.
# And no fast-math anywhere: it lets the compiler assume that no NaN exists.
add_compile_options(-ffp-contract=off)

if(HALFSTEP_DEVELOPER)
  add_compile_options(-Wall -Wextra -Werror)
  # gcc 12 sees overlapping copies in std::string where there are none (its bugs 105329 and 105651).
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    add_compile_options(-Wno-restrict)
  endif()
endif()

if(HALFSTEP_SANITIZE)
  add_compile_options(-fsanitize=${HALFSTEP_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${HALFSTEP_SANITIZE})
  # gcc warns that it cannot follow a fence which its own <thread> uses.
  if(HALFSTEP_SANITIZE STREQUAL "thread" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options(-Wno-tsan)
  endif()
endif()

find_program(CCACHE ccache)
if(CCACHE AND HALFSTEP_DEVELOPER)
  # The sloppiness and the options are what ccache's manual asks for with precompiled headers.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${CCACHE})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options(-fpch-preprocess)
  else()
    add_compile_options("SHELL:-Xclang -fno-pch-timestamp")
  endif()
endif()
