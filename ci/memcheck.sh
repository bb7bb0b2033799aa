#!/usr/bin/env bash
# Runs the small cases of the kernels under compute-sanitizer's memcheck, from a built wheel. Needs a GPU and the CUDA toolkit.
#
#   ci/memcheck.sh [WHEEL] [RANKS]     WHEEL defaults to the one in dist/, RANKS to 1
set -euo pipefail
cd "$(dirname "$0")/.."

wheel=${1:-$(ls dist/*.whl)}
[ -f "$wheel" ] || { echo "memcheck: '$wheel' is no wheel" >&2; exit 2; }
checker=$(command -v compute-sanitizer || find /usr/local/cuda*/bin -name compute-sanitizer 2>/dev/null | head -n 1 || true)
[ -n "$checker" ] || { echo "memcheck: no compute-sanitizer on the path or under /usr/local/cuda*/bin" >&2; exit 2; }

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m pip install --quiet --no-index --no-deps --target "$site" "$wheel"
# Memory that the allocator has cached would hide a write behind the end of a buffer.
export PYTHONPATH="$site:python/tests" PYTORCH_NO_CUDA_MEMORY_CACHING=1
for cases in memcheck_route memcheck_forward memcheck_forward_fp8 memcheck_backward; do
    "$checker" --tool memcheck --error-exitcode 1 python3 -m "gpu.$cases" "${2:-1}"
done
for precision in fp8_bwd fp8_bwd_dw; do
    "$checker" --tool memcheck --error-exitcode 1 python3 -m gpu.memcheck_backward "${2:-1}" "$precision"
done
