# The suffix of a file decides where it is built:
#   *_cuda.cu  CUDA objects    *_torch.cpp  PyTorch module    every other .cpp of an op  core
# Globs are checked again at every build: a new op edits no list.
file(GLOB TIGON_CORE_SOURCES CONFIGURE_DEPENDS csrc/tigon/base/*.cpp csrc/tigon/base/simd/*.cpp csrc/tigon/ops/*/*.cpp)
list(FILTER TIGON_CORE_SOURCES EXCLUDE REGEX "_torch\\.cpp$")
file(GLOB TIGON_CUDA_SOURCES CONFIGURE_DEPENDS csrc/tigon/base/cuda/*.cu csrc/tigon/base/cuda/*.cpp csrc/tigon/ops/*/*_cuda.cu)
if(TIGON_WITH_CUDA)
  list(FILTER TIGON_CORE_SOURCES EXCLUDE REGEX "context_no_cuda\\.cpp$")
  list(APPEND TIGON_CORE_SOURCES ${TIGON_CUDA_SOURCES})
endif()

# -ffp-contract=off: fma only where it is written, so that every instruction set gives the same bits.
# -Wno-missing-field-initializers: argument structs are filled by designated initialisers, the rest is the default.
# -Wno-psabi: vector types stay inside always-inline functions. -Wno-(maybe-)uninitialized: GCC 12 reports its own AVX-512
# header (the deliberately undefined operand of unmasked intrinsics).
set(TIGON_CXX_FLAGS -Wall -Wextra $<$<BOOL:${TIGON_WERROR}>:-Werror> -Wno-missing-field-initializers
    -fno-math-errno -fno-trapping-math -ffp-contract=off -Wno-psabi
    $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized> $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized>)

add_library(tigon_objects OBJECT ${TIGON_CORE_SOURCES})
target_include_directories(tigon_objects PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/csrc>)
target_compile_definitions(tigon_objects PUBLIC TIGON_WITH_CUDA=$<BOOL:${TIGON_WITH_CUDA}>)
target_compile_options(tigon_objects PRIVATE
  $<$<COMPILE_LANGUAGE:CXX>:${TIGON_CXX_FLAGS}>
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Wno-missing-field-initializers --expt-relaxed-constexpr>
  $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${TIGON_WERROR}>>:-Werror=all-warnings -Xcompiler=-Werror>)
if(TIGON_CUDA_ARCHS MATCHES "90a")
  set_source_files_properties(csrc/tigon/base/cuda/context_cuda.cu PROPERTIES COMPILE_DEFINITIONS TIGON_SM90A)
endif()
if(TIGON_WITH_CUDA AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.9)
  target_compile_options(tigon_objects PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
endif()
# What checks and drives an op's kernels is compiled for size.
file(GLOB drivers CONFIGURE_DEPENDS csrc/tigon/ops/*/*.cpp)
list(FILTER drivers EXCLUDE REGEX "_(cpu|torch)\\.cpp$")
set_source_files_properties(${drivers} PROPERTIES COMPILE_OPTIONS $<$<CONFIG:Release>:-Os>)
find_package(Threads REQUIRED)
target_link_libraries(tigon_objects PUBLIC Threads::Threads ${CMAKE_DL_LIBS})
if(TIGON_WITH_CUDA)
  target_link_libraries(tigon_objects PUBLIC CUDA::cudart_static)
endif()
target_link_options(tigon_objects PUBLIC $<$<CONFIG:Release>:-Wl,--strip-all>)  # what is exported stays
if(TIGON_SANITIZE)
  target_compile_options(tigon_objects PUBLIC $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=address,undefined -g>)
  target_link_options(tigon_objects PUBLIC -fsanitize=address,undefined)
endif()

# The C++ library: find_package(tigon), link tigon::tigon, no framework needed.
add_library(tigon SHARED)
add_library(tigon::tigon ALIAS tigon)
target_link_libraries(tigon PRIVATE tigon_objects)
# Public headers: of an op those that declare exported functions, of the base what they and a program need.
set(public_headers activation.h check.h context.h distribution.h dtype.h elementwise.h error.h export.h fields.h gated_unit.h make_context.h row_bytes.h tensor.h)
list(TRANSFORM public_headers PREPEND csrc/tigon/base/)
file(GLOB op_headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR} csrc/tigon/ops/*/*.h)
foreach(header IN LISTS op_headers)
  file(STRINGS ${header} exported REGEX "^TIGON_API")
  if(exported)
    list(APPEND public_headers ${header})
  endif()
endforeach()
target_sources(tigon PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR}/csrc FILES ${public_headers})
target_compile_features(tigon PUBLIC cxx_std_20)
set_target_properties(tigon PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION 0 LINKER_LANGUAGE CXX)

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(TIGON_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/tigon)
install(TARGETS tigon EXPORT tigonTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp
        FILE_SET HEADERS DESTINATION include COMPONENT cpp)
install(EXPORT tigonTargets NAMESPACE tigon:: DESTINATION ${TIGON_PACKAGE_DIR} COMPONENT cpp)
configure_package_config_file(cmake/tigonConfig.cmake.in tigonConfig.cmake INSTALL_DESTINATION ${TIGON_PACKAGE_DIR})
write_basic_package_version_file(tigonConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/tigonConfig.cmake ${PROJECT_BINARY_DIR}/tigonConfigVersion.cmake
        DESTINATION ${TIGON_PACKAGE_DIR} COMPONENT cpp)
