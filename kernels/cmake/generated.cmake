# What is made from other files at configure time, under MEGA_MOE_GENERATED: the sources of the instances
# (MEGA_MOE_ARCHITECTURES, MEGA_MOE_INSTANCES_<architecture>), the variant table, build.json and the same as a C++ string.
set(MEGA_MOE_GENERATED "${CMAKE_BINARY_DIR}/generated")

function(mega_moe_python)
  execute_process(COMMAND "${Python_EXECUTABLE}" ${ARGN}
    OUTPUT_VARIABLE output OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  set(output "${output}" PARENT_SCOPE)
endfunction()

mega_moe_python("${CMAKE_CURRENT_SOURCE_DIR}/generate.py" "${CMAKE_CURRENT_SOURCE_DIR}/variants.toml" "${MEGA_MOE_GENERATED}")
string(REPLACE "\n" ";" lines "${output}")
while(lines)
  list(POP_FRONT lines architecture source)
  list(APPEND MEGA_MOE_ARCHITECTURES "${architecture}")
  list(APPEND MEGA_MOE_INSTANCES_${architecture} "${source}")
endwhile()
list(REMOVE_DUPLICATES MEGA_MOE_ARCHITECTURES)

# The hash in build.json is of all sources, so any change of one reruns the configuration.
mega_moe_python("${CMAKE_CURRENT_SOURCE_DIR}/hash_kernels.py" --list)
string(REPLACE "\n" ";" hashed_files "${output}")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${hashed_files})
mega_moe_python("${CMAKE_CURRENT_SOURCE_DIR}/hash_kernels.py")
set(kernels_sha256 "${output}")

set(MEGA_MOE_TORCH_TARGET "2.10")
list(JOIN MEGA_MOE_ARCHITECTURES "\", \"" quoted_architectures)
string(CONCAT build_json
  "{\"version\": \"${MEGA_MOE_VERSION}\", "
  "\"cuda\": \"${CUDAToolkit_VERSION_MAJOR}.${CUDAToolkit_VERSION_MINOR}\", "
  "\"compiler\": \"${CMAKE_CUDA_COMPILER_VERSION}\", "
  "\"architectures\": [\"${quoted_architectures}\"], "
  "\"torch_target\": \"${MEGA_MOE_TORCH_TARGET}\", "
  "\"kernels_sha256\": \"${kernels_sha256}\"}")
file(CONFIGURE OUTPUT "${MEGA_MOE_GENERATED}/build.json" CONTENT "@build_json@\n" @ONLY)
file(CONFIGURE OUTPUT "${MEGA_MOE_GENERATED}/table/host/build_json.inc"
  CONTENT "inline constexpr char kBuildJson[] = R\"json(@build_json@)json\";\n" @ONLY)

add_library(mega_moe_generated INTERFACE)
target_include_directories(mega_moe_generated INTERFACE "${MEGA_MOE_GENERATED}/table")

# Keeps what ptxas says of each instance in ptxas/<source>.log of the build folder, also where a compiler cache says it.
set(MEGA_MOE_PTXAS_LOGS "${CMAKE_BINARY_DIR}/ptxas")
function(mega_moe_capture_ptxas target)
  set(launcher "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/cmake/keep_ptxas_log.py" "${MEGA_MOE_PTXAS_LOGS}"
    ${CMAKE_CUDA_COMPILER_LAUNCHER})
  set_target_properties(${target} PROPERTIES CUDA_COMPILER_LAUNCHER "${launcher}")
endfunction()

# Fails the build on spills over a variant's budget and on any C75xx remark; writes which kernels each variant has.
set(MEGA_MOE_KERNELS "${CMAKE_BINARY_DIR}/kernels.json")
function(mega_moe_check_ptxas target)
  add_custom_command(TARGET ${target} POST_BUILD VERBATIM COMMAND
    "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/../ci/check_ptxas.py"
    "${CMAKE_CURRENT_SOURCE_DIR}/variants.toml" "${MEGA_MOE_PTXAS_LOGS}" "${MEGA_MOE_KERNELS}")
endfunction()
