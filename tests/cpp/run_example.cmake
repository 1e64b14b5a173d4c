# Installs the C++ library to a fresh prefix, builds examples/cpp against it and runs the program.
set(WORK ${BUILD}/example)
file(REMOVE_RECURSE ${WORK})
foreach(step IN ITEMS
    "${CMAKE_COMMAND};--install;${BUILD};--component;cpp;--prefix;${WORK}/prefix"
    "${CMAKE_COMMAND};-G;${GENERATOR};-S;${SOURCE};-B;${WORK}/build;-DCMAKE_PREFIX_PATH=${WORK}/prefix;-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM};-DCMAKE_CXX_COMPILER=${CXX}"
    "${CMAKE_COMMAND};--build;${WORK}/build"
    "${WORK}/build/train_head")
  execute_process(COMMAND ${step} RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(failed)
    list(JOIN step " " command)
    message(FATAL_ERROR "${command}\n${output}")
  endif()
endforeach()
message("${output}")
if(NOT output MATCHES "loss fell from")
  message(FATAL_ERROR "the example printed no result")
endif()
