#!/usr/bin/env bash
# draftwood on a CUDA machine that cannot reach a network: pack here, build and test there.
#
#   tools/gpu.sh compile ARCH...  here: our CUDA sources, for sm_90 or what is named (sm_80, sm_120), without linking
#   tools/gpu.sh pack             here: the same; patched sources and missing wheels into build/gpu, which travels with the tree
#   tools/gpu.sh build FOLDER     there: the wheel for that card, installed; what it compiled is archived in FOLDER
#   tools/gpu.sh keep FOLDER      here: the larger part of that into build/gpu, for the next build there
#   tools/gpu.sh wheel FOLDER     there: a portable wheel for that card; installed and tried in a clean environment
#   tools/gpu.sh run COMMAND...   there: COMMAND with that installation
#   tools/gpu.sh test FOLDER PART...  there: tests/gpu in parts (bench/run.py test --help); log and rows into FOLDER
#   tools/gpu.sh bench STAGE...   there: stages of bench/run.py, with its options; bench/run.py collect runs here
#   tools/gpu.sh chain [ARCH]     here: bench/chain, which times a layer's ops without the library; build/gpu/chain runs there
#
# The machine has CUDA, CMake, ninja, pytest with xdist and timeout, and what pyproject.toml's dependencies name, except for $wheels.
set -euo pipefail
cd "$(dirname "$0")/.."
packed=build/gpu
site=/tmp/draftwood-site
wheels="diskcache gguf click jinja2 markdown-it-py mdurl prompt_toolkit pygments rich typing_extensions wcwidth"
# too large to pack, or compiled for its Python: a clean environment gets the machine's own copies of these
borrowed="numpy markupsafe nvidia-cuda-runtime nvidia-cublas"

# Our own CUDA sources, so that what does not compile is found here and not there.
compile() {
    cublas_headers
    includes="-Isrc -I$cublas -I$tree/include -I$tree/src -I$tree/src/ggml-cuda"
    for arch in "${@:-sm_90}"; do # to the end: ptxas reads what is inline
        find src -name '*.cu' -print0 |
            xargs -0 -P "$(nproc)" -I{} sh -c '"$@" {} -o "$made/$(basename {}).cubin"' nvcc nvcc -arch="$arch" \
                -std=c++17 -extended-lambda -diag-suppress 177,20012 $includes --cubin
    done
}

pack() {
    rm -rf "$packed/source.tar.xz" "$packed/wheels"
    mkdir -p "$packed"
    ! command -v nvcc > /dev/null || compile
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
    find "$kept" -type f -name "*R" -size -210k -delete # quickly compiled again; the tree that travels may be 64 MiB
    tar -C "$kept" -cf - . | xz -T0 -9 > "$packed/ccache.tar.xz"
    rm -rf "$kept"
    du -sh "$packed"/*
}

unpack() {
    mkdir -p build/src
    tar -C build/src -xf "$packed/source.tar.xz"
    export CCACHE_DIR=/tmp/draftwood-ccache CCACHE_BASEDIR=/ CCACHE_NOHASHDIR=1
    export CCACHE_COMPILERCHECK=content # each machine's compilers have times of their own
    mkdir -p "$CCACHE_DIR"
    tar -C "$CCACHE_DIR" -xf "$packed/ccache.tar.xz" 2>/dev/null || echo "no compiler cache: a full build"
    printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s "$@"\n' "$PWD/$packed/bin" "$PWD/$packed/bin/ccache" > /usr/local/bin/ccache
    chmod +x /usr/local/bin/ccache
    export CMAKE_ARGS="-DGGML_CUDA=on -DCMAKE_CUDA_ARCHITECTURES=native" CMAKE_BUILD_PARALLEL_LEVEL=$(nproc)
}

build() {
    unpack
    rm -rf "$site" # pip does not replace what lies there
    python3 -m pip install -q --no-index --no-deps --target "$site" "$packed"/wheels/*.whl
    python3 -m pip install -v --no-index --no-deps --no-build-isolation --target "$site" . > "$1/build.log" 2>&1 ||
        { tail -60 "$1/build.log"; exit 1; }
    cp "$packed/commit.json" "$site/draftwood-commit.json" # rows of bench/run.py name it
    ccache --show-stats | grep -iE "hits|misses|size" || true
    tar -C "$CCACHE_DIR" -cf - . | split -b 15M - "$1/ccache.tar." # its files are compressed already
}

# The wheel says which CUDA it needs and is not repaired (tools/repair_wheel.sh): it runs on the machine that built it.
# No index is there, so the CUDA runtime is the machine's own copy of PyPI's wheels, put where pip would put it.
wheel() {
    unpack
    major=$("${CUDACXX:-nvcc}" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
    made=/tmp/draftwood-wheel clean=/tmp/draftwood-clean
    rm -rf "$made"
    python3 -m pip wheel -v --no-index --no-deps --no-build-isolation -C cmake.define.DRAFTWOOD_PORTABLE=ON \
        -C "wheel.build-tag=${major}cuda" -w "$made" . > "$1/wheel.log" 2>&1 || { tail -60 "$1/wheel.log"; exit 1; }
    python3 tools/borrow.py "$clean" $borrowed | tee "$1/borrowed.txt"
    ls -l "$made"
    python3 -m pip --python "$clean/bin/python" install -q --no-index --find-links "$packed/wheels" \
        "$(echo "$made"/draftwood-*.whl)[cuda$major]"
    env -i HOME=/tmp PATH="$clean/bin" LD_PRELOAD="$(libstdcxx)" LD_LIBRARY_PATH="$(driver)" \
        "$clean/bin/python" tools/try_wheel.py models/tiny-moe/tiny-moe-f16.gguf --backend CUDA --own-runtime \
        2> "$1/try.log" | tee "$1/try.json" || { tail -20 "$1/try.log"; exit 1; }
}

# The folder with the driver's library, if the loader does not know it.
driver() {
    ldconfig -p | grep -q 'libcuda\.so\.1 ' && return
    folders=${LD_LIBRARY_PATH-}
    for folder in ${folders//:/ }; do
        [ ! -e "$folder/libcuda.so.1" ] || { echo "$folder"; return; }
    done
}

# Its compiler links libstdc++ into every library, and copies of it that meet in one process crash: one for all.
libstdcxx() {
    ldconfig -p | sed -n 's/.*libstdc++\.so\.6 .*=> //p' | head -1
}

run() {
    # Safe path: what lies in the tree must not shadow the installation.
    LD_PRELOAD=$(libstdcxx) PYTHONPATH="$site" PYTHONSAFEPATH=1 "$@"
}

bench() {
    run python3 bench/run.py run "$@"
}

# Sets `tree`, ggml's sources, and `cublas`, headers alone of a large package.
cublas_headers() {
    tree="$(readlink -f "$(.venv/bin/python _build/source.py)")/vendor/llama.cpp/ggml"
    export made=build/chain
    cublas=build/chain/cublas
    mkdir -p "$made"
    if [ ! -d "$cublas" ]; then
        .venv/bin/python -m pip download -q --no-deps -d "$made" nvidia-cublas
        .venv/bin/python -m zipfile -e "$made"/nvidia_cublas-*.whl "$made/wheel"
        mv "$made"/wheel/nvidia/cu*/include "$cublas"
        rm -rf "$made/wheel" "$made"/nvidia_cublas-*.whl
    fi
}

# Only the ops' own sources, for one architecture: a minute where the library takes an hour.
chain() {
    cublas_headers
    mkdir -p "$packed"
    rm -f "$made"/*.o
    printf '#define GGML_VERSION "chain"\n#define GGML_COMMIT "chain"\n' > "$made/ggml-version.h"
    includes="-Isrc -Ibench -I$made -I$cublas -I$tree/include -I$tree/src -I$tree/src/ggml-cuda"
    for source in ggml.c ggml-quants.c; do
        gcc -O2 -ffunction-sections $includes -c "$tree/src/$source" -o "$made/$source.o"
    done
    printf '%s\n' src/ops/{layer-parts,tree-delta-net}/*.cu bench/chain/chain.cu |
        xargs -P "$(nproc)" -I{} sh -c 'nvcc "$@" -c {} -o "'"$made"'/$(basename {}).o"' nvcc -arch="${1:-sm_90}" -O3 \
            -std=c++17 -use_fast_math -extended-lambda -diag-suppress 177,20012 $includes
    # what ggml.c asks of backends is not called, and not linked
    nvcc -arch="${1:-sm_90}" -Xlinker -z -Xlinker now -Xlinker --gc-sections -Xlinker --unresolved-symbols=ignore-all -o "$packed/chain" "$made"/*.o
    strip "$packed/chain"
}

case "${1:-}" in
    compile | pack | build | keep | wheel | run | bench | chain) "$@" ;;
    test) run python3 bench/run.py "$@" ;;
    *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2 && exit 2 ;;
esac
