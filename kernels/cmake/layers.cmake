# mega_moe_header_layer(NAME): interface target mega_moe_NAME that makes the headers of one layer findable, and no others.
# Sources include "<layer>/...": each layer gets a root of its own that holds one link. include/ is already such a root.
function(mega_moe_header_layer name)
  set(root "${CMAKE_BINARY_DIR}/roots/${name}")
  if(name STREQUAL "include")
    set(root "${CMAKE_CURRENT_SOURCE_DIR}/include")
  else()
    file(MAKE_DIRECTORY "${root}")
    file(CREATE_LINK "${CMAKE_CURRENT_SOURCE_DIR}/${name}" "${root}/${name}" SYMBOLIC)
  endif()
  add_library(mega_moe_${name} INTERFACE)
  target_include_directories(mega_moe_${name} INTERFACE "${root}")
endfunction()
