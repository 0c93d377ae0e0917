# Flags every target of ours gets: strict warnings as errors, and arithmetic that keeps its bits (no contraction, no fast-math;
# sqrt without errno and no trapping so that loops vectorise). CUDA sources have flags of their own (SpipeCuda.cmake).
add_library(spipe_flags INTERFACE)
set(flags -Wall -Wextra -Werror -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wno-missing-field-initializers
          -ffp-contract=off -fno-math-errno -fno-trapping-math -fvisibility=hidden)
target_compile_options(spipe_flags INTERFACE "$<$<NOT:$<COMPILE_LANGUAGE:CUDA>>:${flags}>")
# GCC 12 warns falsely on "text" + std::string at -O3 (its bug 105651).
target_compile_options(spipe_flags INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>)
# Sanitizers' own code makes GCC see uninitialised values in the standard library.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_FLAGS MATCHES "-fsanitize")
  target_compile_options(spipe_flags INTERFACE $<$<NOT:$<COMPILE_LANGUAGE:CUDA>>:-Wno-maybe-uninitialized>)
endif()
target_include_directories(spipe_flags INTERFACE ${CMAKE_SOURCE_DIR}/include ${CMAKE_SOURCE_DIR})

# spipe_library(name sources...): one static library per room.
function(spipe_library name)
  add_library(${name} STATIC ${ARGN})
  target_link_libraries(${name} PUBLIC spipe_flags)
endfunction()
