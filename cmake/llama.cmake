# llama.cpp as a subproject: which parts are built, and under which private names.

find_program(DRAFTWOOD_CCACHE ccache)
if (DRAFTWOOD_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    foreach(lang C CXX CUDA)
        set(CMAKE_${lang}_COMPILER_LAUNCHER "${DRAFTWOOD_CCACHE}")
    endforeach()
endif()

set(BUILD_SHARED_LIBS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)

# a cache entry given by the user (CMAKE_ARGS="-DGGML_CUDA=on") wins over these defaults
function(draftwood_default name value)
    if (NOT DEFINED CACHE{${name}})
        set(${name} ${value} CACHE STRING "set by draftwood")
    endif()
endfunction()

draftwood_default(GGML_CCACHE           OFF)   # done above, for every target
draftwood_default(GGML_RPC              ON)
draftwood_default(GGML_CUDA_NCCL        OFF)
draftwood_default(LLAMA_BUILD_COMMON    ON)
draftwood_default(LLAMA_BUILD_TOOLS     ON)
draftwood_default(LLAMA_BUILD_SERVER    ON)
draftwood_default(LLAMA_BUILD_TESTS     OFF)
draftwood_default(LLAMA_BUILD_EXAMPLES  OFF)
draftwood_default(LLAMA_BUILD_APP       OFF)
draftwood_default(LLAMA_BUILD_UI        OFF)   # the web page would be fetched from a model hub
draftwood_default(LLAMA_USE_PREBUILT_UI OFF)
draftwood_default(LLAMA_OPENSSL         OFF)
# fixed ids: the tree has no .git, and ids that change with it would break ccache
draftwood_default(LLAMA_BUILD_NUMBER    1)
set(LLAMA_BUILD_COMMIT "${DRAFTWOOD_PIN_COMMIT}" CACHE STRING "set by draftwood" FORCE)  # moves with the pin

# Backends are modules that src/hooks/backend-modules.cpp finds beside the library. So one wheel can hold the CPU
# backend once per instruction set, and a CUDA module does not keep the library from loading where CUDA is missing.
draftwood_default(GGML_BACKEND_DL       ON)
if (NOT GGML_BACKEND_DL)
    message(FATAL_ERROR
        "GGML_BACKEND_DL is off; expected on: draftwood loads its backends as modules.\n\n"
        "hint: leave it out; if a build of an older draftwood left it in ${CMAKE_BINARY_DIR}, delete that folder")
endif()
include(cmake/cpu-variants.cmake)

# ggml asks git for its commit, and would be told that of the repository around it
set(ENV{GIT_CEILING_DIRECTORIES} "${DRAFTWOOD_SDIST_DIR}")
add_subdirectory("${DRAFTWOOD_SDIST_DIR}/vendor/llama.cpp" "${CMAKE_BINARY_DIR}/llama.cpp" EXCLUDE_FROM_ALL)
draftwood_finish_cpu_variants()

# A cold build is shorter: mtmd's many small models in a few units, as llama.cpp does for src/models, and less
# optimization for the largest file in which no time is spent.
get_target_property(folder mtmd SOURCE_DIR)
get_target_property(apart mtmd SOURCES)
list(FILTER apart EXCLUDE REGEX "^models/")
list(TRANSFORM apart PREPEND "${folder}/")
set_source_files_properties(${apart} TARGET_DIRECTORY mtmd PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
set_target_properties(mtmd PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
if (NOT MSVC AND CMAKE_BUILD_TYPE STREQUAL "Release")
    get_target_property(folder llama-common SOURCE_DIR)
    set_source_files_properties("${folder}/arg.cpp" TARGET_DIRECTORY llama-common PROPERTIES COMPILE_OPTIONS -O1)
endif()

# what configures tiles of AMX, for compilers that optimize it away
if (NOT MSVC)
    get_target_property(folder ggml-base SOURCE_DIR)
    set_source_files_properties("${folder}/ggml-cpu/amx/mmq.cpp" DIRECTORY "${folder}"
        PROPERTIES COMPILE_OPTIONS "-include;${CMAKE_CURRENT_LIST_DIR}/tile-config.h")
endif()

set(DRAFTWOOD_LIBS ggml-base ggml llama mtmd llama-common llama-server-impl)
foreach(backend IN LISTS GGML_AVAILABLE_BACKENDS)   # ggml's own list: CPU, and what the options switched on
    if (TARGET ${backend})                          # it is a cache entry and keeps what was switched off since
        list(APPEND DRAFTWOOD_LIBS ${backend})
    endif()
endforeach()
set(DRAFTWOOD_PROGRAMS llama-server)
if (GGML_RPC)
    list(APPEND DRAFTWOOD_PROGRAMS ggml-rpc-server)
endif()

# Unversioned files and sonames of our own: the loader would bind a stock libllama's `libggml.so.0`
# to ours, and the other way round, if both lived in one process (tests/compat/test_two_libraries.py).
# llama and mtmd too: llama-cpp-python 0.3.16 calls them plain `libllama.so`. _build/pyfiles.py knows the names.
set(origin "$ORIGIN")
if (APPLE)
    set(origin "@loader_path")
endif()
foreach(target IN LISTS DRAFTWOOD_LIBS)
    foreach(property VERSION SOVERSION PUBLIC_HEADER PRIVATE_HEADER)
        set_property(TARGET ${target} PROPERTY ${property})
    endforeach()
    set_target_properties(${target} PROPERTIES
        OUTPUT_NAME "draftwood-${target}" INSTALL_RPATH "${origin}" EXCLUDE_FROM_ALL OFF)
    if (WIN32)
        set_property(TARGET ${target} PROPERTY PREFIX "")   # MinGW's is "lib"
    endif()
endforeach()
# Where PyPI's wheels of the CUDA runtime put it, so that no toolkit is needed (pyproject.toml's cuda12 and cuda13).
# LD_LIBRARY_PATH comes first, the system's folders come last.
if (TARGET ggml-cuda)
    get_target_property(folder ggml-cuda SOURCE_DIR)
    get_directory_property(major DIRECTORY "${folder}" DEFINITION CUDAToolkit_VERSION_MAJOR)
    set(runtime "$ORIGIN/../../../nvidia/cu${major}/lib")
    if (major LESS 13)
        set(runtime "$ORIGIN/../../../nvidia/cuda_runtime/lib;$ORIGIN/../../../nvidia/cublas/lib")
    endif()
    set_property(TARGET ggml-cuda APPEND PROPERTY INSTALL_RPATH "${runtime}")
    if (UNIX)
        target_link_options(ggml-cuda PRIVATE LINKER:--enable-new-dtags)
    endif()
endif()
foreach(target IN LISTS DRAFTWOOD_PROGRAMS)
    set_target_properties(${target} PROPERTIES INSTALL_RPATH "${origin}/../_llama_cpp/lib")
endforeach()
