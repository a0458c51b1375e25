# What the wheel holds besides python/draftwood. One component, so llama.cpp's own rules never run.

add_custom_target(draftwood-all DEPENDS ${DRAFTWOOD_LIBS} ${DRAFTWOOD_PROGRAMS})

# a DLL of Windows is a RUNTIME to CMake, if it is linked to, and else a LIBRARY
install(TARGETS ${DRAFTWOOD_LIBS}
        LIBRARY DESTINATION ${DRAFTWOOD_LIB_DIR} COMPONENT draftwood
        RUNTIME DESTINATION ${DRAFTWOOD_LIB_DIR} COMPONENT draftwood)
install(TARGETS ${DRAFTWOOD_PROGRAMS}
        RUNTIME DESTINATION ${DRAFTWOOD_BIN_DIR} COMPONENT draftwood)

if (DRAFTWOOD_STAGED_PYTHON)
    install(DIRECTORY "${DRAFTWOOD_STAGED_PYTHON}/" DESTINATION draftwood/_llama_cpp COMPONENT draftwood
            FILES_MATCHING PATTERN "*.py" PATTERN "py.typed")
endif()

install(FILES src/include/draftwood.h src/include/draftwood-experts.h DESTINATION draftwood/include COMPONENT draftwood)
install(FILES cmake/draftwood.pth DESTINATION . COMPONENT draftwood)
# an editable install keeps python/draftwood where it is, but a .pth line needs the folder in site-packages
install(DIRECTORY python/draftwood/_alias DESTINATION draftwood COMPONENT draftwood FILES_MATCHING PATTERN "*.py")

# licences of what is bundled: the table in vendor/README.md, whose rows tests/unit/test_licences.py looks for here
function(draftwood_licence source name)
    install(FILES "${DRAFTWOOD_SDIST_DIR}/${source}" DESTINATION draftwood/licenses RENAME ${name} COMPONENT draftwood)
endfunction()

# a licence that stands in a source file: from `begin` (empty: the file's begin) to the end of `end` (empty: its end)
function(draftwood_licence_in source name begin end)
    file(READ "${DRAFTWOOD_SDIST_DIR}/${source}" text)
    set(first 0)
    if (begin)
        string(FIND "${text}" "${begin}" first)
    endif()
    set(size -1)
    if (end)
        string(FIND "${text}" "${end}" last)
        string(LENGTH "${end}" size)
        math(EXPR size "${last} + ${size} - ${first}")
    else()
        set(last 0)
    endif()
    if (first EQUAL -1 OR last EQUAL -1)
        message(FATAL_ERROR "${source} has no licence between '${begin}' and '${end}'; expected one.\n"
            "hint: see where it is now, and change cmake/install.cmake")
    endif()
    string(SUBSTRING "${text}" ${first} ${size} text)
    file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/licences/${name}" "${text}\n")
    install(FILES "${CMAKE_CURRENT_BINARY_DIR}/licences/${name}" DESTINATION draftwood/licenses COMPONENT draftwood)
endfunction()

draftwood_licence(LICENSE.md llama-cpp-python.md)
draftwood_licence(vendor/llama.cpp/LICENSE llama.cpp.txt)
draftwood_licence(vendor/llama.cpp/licenses/LICENSE-jsonhpp nlohmann-json.txt)
draftwood_licence(vendor/llama.cpp/vendor/cpp-httplib/LICENSE cpp-httplib.txt)
draftwood_licence(vendor/llama.cpp/vendor/hash/xxhash/LICENSE xxhash.txt)
draftwood_licence(vendor/llama.cpp/vendor/hash/rotate-bits/LICENSE.md rotate-bits.md)
draftwood_licence(vendor/llama.cpp/vendor/hash/sha256/LICENSE sha256.txt)
draftwood_licence_in(vendor/llama.cpp/ggml/src/ggml-cpu/llamafile/sgemm.cpp llamafile.txt "" "// SOFTWARE.")
draftwood_licence_in(vendor/llama.cpp/vendor/stb/stb_image.h stb_image.txt
    "This software is available under 2 licenses" "")
draftwood_licence_in(vendor/llama.cpp/vendor/miniaudio/miniaudio.h miniaudio.txt
    "ALTERNATIVE 1 - Public Domain" "")
draftwood_licence_in(vendor/llama.cpp/vendor/sheredom/subprocess.h subprocess.txt "" "<http://unlicense.org/>")
draftwood_licence_in(vendor/llama.cpp/vendor/hash/sha1/sha1.c sha1.txt "" "100% Public Domain")
