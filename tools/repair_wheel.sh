#!/usr/bin/env bash
# A wheel that runs on other Linux machines: with the OpenMP runtime that GCC links to, and a tag that says which glibc
# it needs.
#
#   tools/repair_wheel.sh WHEEL FOLDER    WHEEL with both, into FOLDER
#
# CUDA's libraries stay out. The driver brings libcuda, the extras cuda12 and cuda13 bring the others. libgomp lies
# beside our libraries, where their RUNPATH looks already. Needs auditwheel and patchelf.
set -euo pipefail
exec auditwheel repair --lib-sdir /_llama_cpp/lib -w "$2" \
    --exclude 'libcuda.so.*' --exclude 'libcudart.so.*' --exclude 'libcublas.so.*' --exclude 'libcublasLt.so.*' "$1"
