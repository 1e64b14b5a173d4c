# Builds examples/cpp against the installed C++ library and runs the programs.
function(run expected)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output)
  list(JOIN ARGN " " command)
  if(failed OR NOT output MATCHES "${expected}")
    message(FATAL_ERROR "${command}\n${output}")
  endif()
  message("${output}")
endfunction()

file(REMOVE_RECURSE ${BUILD})
run("" ${CMAKE_COMMAND} -G ${GENERATOR} -S ${SOURCE} -B ${BUILD} -DCMAKE_PREFIX_PATH=${PREFIX}
  -DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM} -DCMAKE_CXX_COMPILER=${CXX})
run("" ${CMAKE_COMMAND} --build ${BUILD})
run("loss fell from" ${BUILD}/train_head)
run("loads with transformers" ${BUILD}/train_llama --data ${SOURCE} --out ${BUILD}/out --steps 2 --batch 2 --seq 48)
