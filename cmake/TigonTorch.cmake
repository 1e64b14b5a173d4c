# The PyTorch module: LibTorch Stable ABI only. Needs the headers and libtorch_cpu of any PyTorch >= 2.10; the binary then
# loads beside every PyTorch >= 2.10, CPU or CUDA, and every Python. find_package(Torch) is not used: it drags in CUDA flags.
find_package(Python REQUIRED COMPONENTS Interpreter)
if(NOT TIGON_TORCH_DIR)
  # -E: without pip's variables the interpreter's own torch is found inside an isolated build environment too.
  execute_process(COMMAND ${Python_EXECUTABLE} -E ${PROJECT_SOURCE_DIR}/cmake/find_torch.py
    OUTPUT_VARIABLE TIGON_TORCH_DIR ERROR_VARIABLE no_torch OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(no_torch)
    message(FATAL_ERROR "${no_torch}\nC++ library only: -DTIGON_TORCH=OFF")
  endif()
endif()
set(TIGON_TORCH_DIR "${TIGON_TORCH_DIR}" CACHE PATH "Directory of the torch Python package")
set(torch_include ${TIGON_TORCH_DIR}/include)
if(NOT EXISTS "${torch_include}/torch/csrc/stable/ops.h")
  message(FATAL_ERROR "${torch_include} has no headers of PyTorch >= 2.10: see TIGON_TORCH_DIR")
endif()

file(GLOB TIGON_TORCH_SOURCES CONFIGURE_DEPENDS csrc/tigon/torch/*.cpp csrc/tigon/ops/*/*_torch.cpp)
add_library(tigon_torch MODULE ${TIGON_TORCH_SOURCES})
# Several adaptors are compiled as one file: PyTorch's headers cost more than an adaptor. Each has a namespace of its own.
set_target_properties(tigon_torch PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
set(alone ${TIGON_TORCH_SOURCES})
list(FILTER alone EXCLUDE REGEX "_torch\\.cpp$")
set_source_files_properties(${alone} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
target_link_libraries(tigon_torch PRIVATE tigon_objects ${TIGON_TORCH_DIR}/lib/libtorch_cpu.so)
target_include_directories(tigon_torch SYSTEM PRIVATE ${torch_include})
# 2.10: the oldest PyTorch the binary loads on.
target_compile_definitions(tigon_torch PRIVATE TORCH_TARGET_VERSION=0x020a000000000000)
string(REPLACE ";" " " archs "${TIGON_CUDA_ARCHS}")
set_source_files_properties(csrc/tigon/torch/build_info.cpp PROPERTIES
  COMPILE_DEFINITIONS "TIGON_CUDA_BUILD=\"CUDA ${CMAKE_CUDA_COMPILER_VERSION} (${archs})\"")
# Adaptors are compiled for size; context_cpu.cpp has loops over elements.
target_compile_options(tigon_torch PRIVATE ${TIGON_CXX_FLAGS} $<$<CONFIG:Release>:-Os>)
set_source_files_properties(csrc/tigon/torch/context_cpu.cpp PROPERTIES COMPILE_OPTIONS $<$<CONFIG:Release>:-O3>)
target_link_options(tigon_torch PRIVATE -Wl,-Bsymbolic -Wl,--as-needed)
set_target_properties(tigon_torch PROPERTIES
  LINKER_LANGUAGE CXX BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN" BUILD_RPATH_USE_ORIGIN ON)

# Developers import the package from python/: the module is built straight into it.
set_target_properties(tigon_torch PROPERTIES LIBRARY_OUTPUT_DIRECTORY
  "$<IF:$<BOOL:${SKBUILD}>,${PROJECT_BINARY_DIR},${PROJECT_SOURCE_DIR}/python/tigon/lib>")
install(TARGETS tigon_torch LIBRARY DESTINATION tigon/lib COMPONENT python)
