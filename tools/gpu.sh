#!/usr/bin/env bash
# draftwood on a CUDA machine that cannot reach a network: pack here, build and test there.
#
#   tools/gpu.sh pack             here: patched sources and missing wheels into build/gpu, which travels with the tree
#   tools/gpu.sh build FOLDER     there: the wheel for that card, installed; what it compiled is archived in FOLDER
#   tools/gpu.sh keep FOLDER      here: the larger part of that into build/gpu, for the next build there
#   tools/gpu.sh run COMMAND...   there: COMMAND with that installation
#   tools/gpu.sh test FOLDER PART...  there: tests/gpu in parts (bench/run.py test --help); log and rows into FOLDER
#   tools/gpu.sh bench STAGE...   there: stages of bench/run.py, with its options; bench/run.py collect runs here
#
# The machine has CUDA, CMake, ninja, pytest and what pyproject.toml's dependencies name, except for $wheels.
set -euo pipefail
cd "$(dirname "$0")/.."
packed=build/gpu
site=/tmp/draftwood-site
wheels="diskcache gguf"

pack() {
    rm -rf "$packed/source.tar.xz" "$packed/wheels"
    mkdir -p "$packed"
    tree=$(readlink -f "$(.venv/bin/python _build/source.py)")
    inside="$(basename "$tree")/vendor/llama.cpp"
    left_out=()
    for part in tests examples conversion docs models gguf-py ggml/src/ggml-{sycl,cann,hexagon,opencl,webgpu,vulkan}; do
        left_out+=("--exclude=$inside/$part")
    done
    tar -C "$(dirname "$tree")" -cf - "${left_out[@]}" "$(basename "$tree")" | xz -T0 -6 > "$packed/source.tar.xz"
    .venv/bin/python -m pip download -q --no-deps -d "$packed/wheels" $wheels
    .venv/bin/python bench/run.py stamp > "$packed/commit.json"
    rm -rf "$packed/bin" && mkdir -p "$packed/bin" # the compiler cache, with what it is linked to
    cp "$(command -v ccache)" $(ldd "$(command -v ccache)" | sed -n 's/.*=> \(.*\(zstd\|hiredis\)[^ ]*\) .*/\1/p') "$packed/bin"
    du -sh "$packed"/*
}

keep() {
    kept=$(mktemp -d)
    cat "$1"/ccache.tar.* | tar -C "$kept" -xf -
    CCACHE_DIR="$kept" ccache --recompress 19 > /dev/null
    find "$kept" -type f -name "*R" -size -110k -delete # quickly compiled again; the tree that travels may be 64 MiB
    tar -C "$kept" -cf - . | xz -T0 -9 > "$packed/ccache.tar.xz"
    rm -rf "$kept"
    du -sh "$packed"/*
}

build() {
    mkdir -p build/src
    tar -C build/src -xf "$packed/source.tar.xz"
    python3 -m pip install -q --no-index --no-deps --target "$site" "$packed"/wheels/*.whl
    export CCACHE_DIR=/tmp/draftwood-ccache CCACHE_BASEDIR=/ CCACHE_NOHASHDIR=1
    mkdir -p "$CCACHE_DIR"
    tar -C "$CCACHE_DIR" -xf "$packed/ccache.tar.xz" 2>/dev/null || echo "no compiler cache: a full build"
    printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s "$@"\n' "$PWD/$packed/bin" "$PWD/$packed/bin/ccache" > /usr/local/bin/ccache
    chmod +x /usr/local/bin/ccache
    CMAKE_ARGS="-DGGML_CUDA=on -DCMAKE_CUDA_ARCHITECTURES=native" CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) \
        python3 -m pip install -v --no-index --no-deps --no-build-isolation --target "$site" . > "$1/build.log" 2>&1 ||
        { tail -60 "$1/build.log"; exit 1; }
    cp "$packed/commit.json" "$site/draftwood-commit.json" # rows of bench/run.py name it
    ccache --show-stats | grep -iE "hits|misses|size" || true
    tar -C "$CCACHE_DIR" -cf - . | split -b 15M - "$1/ccache.tar." # its files are compressed already
}

run() {
    # Its compiler links libstdc++ into every library, and copies of it that meet in one process crash: one for all.
    # Safe path: what lies in the tree must not shadow the installation.
    LD_PRELOAD=$(ldconfig -p | sed -n 's/.*libstdc++\.so\.6 .*=> //p' | head -1) PYTHONPATH="$site" PYTHONSAFEPATH=1 "$@"
}

bench() {
    run python3 bench/run.py run "$@"
}

case "${1:-}" in
    pack | build | keep | run | bench) "$@" ;;
    test) run python3 bench/run.py "$@" ;;
    *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2 && exit 2 ;;
esac
