# What the wheel holds besides python/draftwood. One component, so llama.cpp's own rules never run.

add_custom_target(draftwood-all DEPENDS ${DRAFTWOOD_LIBS} ${DRAFTWOOD_PROGRAMS})

install(TARGETS ${DRAFTWOOD_LIBS} LIBRARY DESTINATION ${DRAFTWOOD_LIB_DIR} COMPONENT draftwood)
install(TARGETS ${DRAFTWOOD_PROGRAMS}
        RUNTIME DESTINATION ${DRAFTWOOD_BIN_DIR} COMPONENT draftwood)

if (DRAFTWOOD_STAGED_PYTHON)
    install(DIRECTORY "${DRAFTWOOD_STAGED_PYTHON}/" DESTINATION draftwood/_llama_cpp COMPONENT draftwood
            FILES_MATCHING PATTERN "*.py" PATTERN "py.typed")
endif()

install(FILES src/include/draftwood.h DESTINATION draftwood/include COMPONENT draftwood)
install(FILES cmake/draftwood.pth DESTINATION . COMPONENT draftwood)
# an editable install keeps python/draftwood where it is, but a .pth line needs the folder in site-packages
install(DIRECTORY python/draftwood/_alias DESTINATION draftwood COMPONENT draftwood FILES_MATCHING PATTERN "*.py")

# licences of what is bundled
install(FILES "${DRAFTWOOD_SDIST_DIR}/LICENSE.md"
        DESTINATION draftwood/licenses RENAME llama-cpp-python.md COMPONENT draftwood)
install(FILES "${DRAFTWOOD_SDIST_DIR}/vendor/llama.cpp/LICENSE"
        DESTINATION draftwood/licenses RENAME llama.cpp.txt COMPONENT draftwood)
install(DIRECTORY "${DRAFTWOOD_SDIST_DIR}/vendor/llama.cpp/licenses/"
        DESTINATION draftwood/licenses/llama.cpp COMPONENT draftwood)
