# The CPU backend: one module for this machine (a source install), or one per instruction set (`make wheel`).

option(DRAFTWOOD_PORTABLE "CPU code for any machine of this architecture, chosen when it is loaded" OFF)
# ggml's names, of ggml/src/CMakeLists.txt. Left out: variants for AVX without AVX2, for AVX-512 with either VNNI or VBMI
# (Cascade Lake takes skylakex), and for AMX.
set(DRAFTWOOD_CPU_VARIANTS "x64;sse42;haswell;alderlake;skylakex;icelake;zen4" CACHE STRING
    "with DRAFTWOOD_PORTABLE: the x86 variants to build")

if (NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    set(DRAFTWOOD_CPU_VARIANTS "")   # all that ggml has for this architecture
    if (CMAKE_SYSTEM_NAME STREQUAL "Linux" AND CMAKE_SYSTEM_PROCESSOR STREQUAL "aarch64")
        include(CheckCXXCompilerFlag)
        check_cxx_compiler_flag(-march=armv9.2-a+sme DRAFTWOOD_COMPILER_KNOWS_SME)   # GCC 14
        if (NOT DRAFTWOOD_COMPILER_KNOWS_SME)
            set(DRAFTWOOD_CPU_VARIANTS "armv8.0_1;armv8.2_1;armv8.2_2;armv8.2_3;armv8.6_1;armv8.6_2")
        endif()
    endif()
endif()

# ggml refuses GGML_NATIVE for an x86 module, since the module's score would not know the features. Here the compiler
# is asked for them, so that the module says which CPU it needs.
set(DRAFTWOOD_NATIVE_FEATURES "")
set(DRAFTWOOD_NATIVE OFF)
if (NOT DEFINED GGML_NATIVE AND (CMAKE_CROSSCOMPILING OR DEFINED ENV{SOURCE_DATE_EPOCH}))
    set(GGML_NATIVE OFF)   # as ggml's own default
endif()
if (GGML_CPU_ALL_VARIANTS)
    set(DRAFTWOOD_PORTABLE ON)
endif()
if (DRAFTWOOD_PORTABLE)
    set(GGML_CPU_ALL_VARIANTS ON)
    set(GGML_NATIVE OFF)
elseif (CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$" AND (NOT DEFINED GGML_NATIVE OR GGML_NATIVE))
    set(GGML_NATIVE OFF)
    set(DRAFTWOOD_NATIVE ON)
    execute_process(COMMAND ${CMAKE_CXX_COMPILER} -march=native -dM -E -x c++ /dev/null
        OUTPUT_VARIABLE macros COMMAND_ERROR_IS_FATAL ANY)
    # the compiler's macro = ggml's option
    foreach(pair SSE4_2=SSE42 AVX=AVX F16C=F16C FMA=FMA AVX2=AVX2 BMI2=BMI2 AVXVNNI=AVX_VNNI AVX512F=AVX512
            AVX512VBMI=AVX512_VBMI AVX512VNNI=AVX512_VNNI AVX512BF16=AVX512_BF16 AMX_INT8=AMX_INT8)
        string(REGEX REPLACE ".*=" "" feature ${pair})
        string(REGEX REPLACE "=.*" "" macro ${pair})
        set(GGML_${feature} OFF)   # on by default without GGML_NATIVE, whatever this machine has
        if (macros MATCHES "#define __${macro}__ ")
            list(APPEND DRAFTWOOD_NATIVE_FEATURES GGML_${feature})
        endif()
    endforeach()
endif()

# Sets DRAFTWOOD_CPU_TARGETS. To be called after ggml's targets are there.
function(draftwood_finish_cpu_variants)
    set(targets "")
    foreach(backend IN LISTS GGML_AVAILABLE_BACKENDS)   # a cache entry, which keeps what was switched off since
        if (backend MATCHES "^ggml-cpu" AND TARGET ${backend})
            list(APPEND targets ${backend})
        endif()
    endforeach()
    # ggml-base rounds activations for products that are ggml's own; Arm has fused operations without any option
    foreach(target IN LISTS targets ITEMS ggml-base)
        # A product is rounded, or fused with the sum that takes it, where the source says so. Left to the compiler,
        # the same expression may round in one place and not in the next, and equal rows would differ.
        target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU,Clang>:-ffp-contract=off>)
    endforeach()
    if (DRAFTWOOD_NATIVE)
        target_compile_options(ggml-cpu PRIVATE -march=native)
        target_compile_definitions(ggml-cpu-feats PRIVATE ${DRAFTWOOD_NATIVE_FEATURES})
    endif()
    set(DRAFTWOOD_CPU_TARGETS "${targets}" PARENT_SCOPE)
endfunction()
