# Builds examples/cpp against the installed C++ library and runs the program.
file(REMOVE_RECURSE ${BUILD})
foreach(step IN ITEMS
    "${CMAKE_COMMAND};-G;${GENERATOR};-S;${SOURCE};-B;${BUILD};-DCMAKE_PREFIX_PATH=${PREFIX};-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM};-DCMAKE_CXX_COMPILER=${CXX}"
    "${CMAKE_COMMAND};--build;${BUILD}"
    "${BUILD}/train_head")
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
