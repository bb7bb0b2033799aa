#!/usr/bin/env bash
# Tests a built wheel with the python3 of this machine and the torch and pytest that it has. Needs no network.
#
#   ci/test_wheel.sh cpu|gpu|multi-gpu [WHEEL] [pytest arguments]     WHEEL defaults to the one in dist/
#
# The wheel is unpacked into a temporary folder and tested from there: no source of the package is on the path.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
    echo "test_wheel: $1" >&2
    sed -n '2,5s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

suite=${1:-}
shift || usage "no suite, want cpu, gpu or multi-gpu"
case "$suite" in
cpu) tests=(python/tests/cpu) ;;
gpu) tests=(python/tests/gpu -m "not multi_gpu") ;;
multi-gpu) tests=(python/tests/gpu -m multi_gpu) ;;
*) usage "suite is '$suite', must be cpu, gpu or multi-gpu" ;;
esac

if [[ "${1:-}" == *.whl ]]; then
    wheel=$1
    shift
else
    wheels=(dist/*.whl)
    [ ${#wheels[@]} -eq 1 ] || usage "dist/ holds ${#wheels[@]} wheels, want one"
    wheel=${wheels[0]}
fi
[ -f "$wheel" ] || usage "$wheel: no such file"

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m pip install --quiet --no-index --no-deps --target "$site" "$wheel"
export PYTHONPATH="$site" MEGA_MOE_REQUIRE_INSTALLED=1
# A suite that was asked for on a machine that cannot run it fails instead of skipping everything.
[ "$suite" = cpu ] || export MEGA_MOE_REQUIRE_GPU=1
python3 -c 'import mega_moe, torch; print(f"test_wheel: {mega_moe.__file__}, torch {torch.__version__}")'
python3 -m pytest "${tests[@]}" "$@"
