# mega_moe_torch_stable: headers of the stable ABI and libtorch.so of the torch that the building Python has, any torch from the
# targeted version on, with or without CUDA.
# Asking the import system for the folder takes milliseconds; importing torch takes seconds.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
    "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
  OUTPUT_VARIABLE torch_folder OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
if(NOT EXISTS "${torch_folder}/include/torch/csrc/stable/library.h")
  message(FATAL_ERROR "torch: got folder '${torch_folder}' from ${Python_EXECUTABLE}, want an installed torch >= 2.10 "
    "(its headers and libtorch.so are built against)")
endif()

add_library(mega_moe_torch_stable INTERFACE)
target_include_directories(mega_moe_torch_stable SYSTEM INTERFACE "${torch_folder}/include")
# Target 2.10. USE_CUDA makes the headers declare the CUDA shims.
target_compile_definitions(mega_moe_torch_stable INTERFACE TORCH_TARGET_VERSION=0x020a000000000000 USE_CUDA)
# Builds in different environments hold equal bytes although headers carry their path in error texts.
target_compile_options(mega_moe_torch_stable INTERFACE "-ffile-prefix-map=${torch_folder}/include/=")
# libtorch.so exports nothing itself but needs the libraries that do, so the linker would drop it.
target_link_libraries(mega_moe_torch_stable INTERFACE
  -Wl,--no-as-needed "${torch_folder}/lib/libtorch.so" -Wl,--as-needed)
