# Flags of every target, as the interface target mega_moe_flags.
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
# Relocatable device code would make ptxas drop setmaxnreg.
set(CMAKE_CUDA_SEPARABLE_COMPILATION OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

add_library(mega_moe_flags INTERFACE)
target_compile_features(mega_moe_flags INTERFACE cxx_std_17 cuda_std_17)

set(host_warnings -Wall -Wextra -Wconversion -Wshadow -Werror)
# A path of the building machine in __FILE__ would make the binary depend on where it was built.
set(host_options -ffunction-sections -fdata-sections -ffile-prefix-map=${CMAKE_SOURCE_DIR}/=
    -ffile-prefix-map=${CMAKE_BINARY_DIR}/=)
target_compile_options(mega_moe_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${host_warnings};${host_options}>")

list(JOIN host_options "," joined_host_options)
target_compile_options(mega_moe_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-Xptxas=-v;-Xcompiler=-Wall,-Wextra,-Werror,${joined_host_options}>")
