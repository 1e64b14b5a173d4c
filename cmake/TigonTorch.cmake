# The PyTorch module: LibTorch Stable ABI only. Needs the headers and libtorch_cpu of any PyTorch >= 2.10; the binary then
# loads beside every PyTorch >= 2.10, CPU or CUDA, and every Python. find_package(Torch) is not used: it drags in CUDA flags.
find_package(Python REQUIRED COMPONENTS Interpreter)
if(NOT TIGON_TORCH_DIR)
  # Without pip's variables: inside its isolated build environment this still finds the interpreter's own torch.
  execute_process(
    COMMAND ${CMAKE_COMMAND} -E env --unset=PYTHONPATH --unset=PYTHONNOUSERSITE ${Python_EXECUTABLE} -c
            "import importlib.util as u, os; s = u.find_spec('torch'); print(os.path.dirname(s.origin) if s else '')"
    OUTPUT_VARIABLE TIGON_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
set(TIGON_TORCH_DIR "${TIGON_TORCH_DIR}" CACHE PATH "Directory of the torch Python package")
if(NOT EXISTS "${TIGON_TORCH_DIR}/include/torch/csrc/stable/ops.h")
  message(FATAL_ERROR "PyTorch >= 2.10 must be installed for ${Python_EXECUTABLE} before Tigon is built "
                      "(pip install torch==2.13.0), or set TIGON_TORCH_DIR, or -DTIGON_TORCH=OFF for C++ only. "
                      "uv and other isolated builds: --no-build-isolation, with scikit-build-core installed")
endif()

file(GLOB TIGON_TORCH_SOURCES CONFIGURE_DEPENDS tigon/torch/*.cpp tigon/ops/*/*_torch.cpp)
add_library(tigon_torch MODULE ${TIGON_TORCH_SOURCES})
target_link_libraries(tigon_torch PRIVATE tigon_objects ${TIGON_TORCH_DIR}/lib/libtorch_cpu.so)
target_include_directories(tigon_torch SYSTEM PRIVATE ${TIGON_TORCH_DIR}/include)
# 2.10: the oldest PyTorch the binary loads on.
target_compile_definitions(tigon_torch PRIVATE TORCH_TARGET_VERSION=0x020a000000000000)
string(REPLACE ";" " " archs "${TIGON_CUDA_ARCHS}")
set_source_files_properties(tigon/torch/build_info.cpp PROPERTIES
  COMPILE_DEFINITIONS "TIGON_CUDA_BUILD=\"CUDA ${CMAKE_CUDA_COMPILER_VERSION} (${archs})\"")
target_compile_options(tigon_torch PRIVATE ${TIGON_CXX_FLAGS})
target_link_options(tigon_torch PRIVATE -Wl,-Bsymbolic -Wl,--as-needed)
set_target_properties(tigon_torch PROPERTIES
  LINKER_LANGUAGE CXX BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN" BUILD_RPATH_USE_ORIGIN ON)

# Developers import the package from python/: the module is built straight into it.
set_target_properties(tigon_torch PROPERTIES LIBRARY_OUTPUT_DIRECTORY
  "$<IF:$<BOOL:${SKBUILD}>,${PROJECT_BINARY_DIR},${PROJECT_SOURCE_DIR}/python/tigon/lib>")
install(TARGETS tigon_torch LIBRARY DESTINATION tigon/lib COMPONENT python)
