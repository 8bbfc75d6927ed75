# shellcheck shell=bash disable=SC2034
# What quickstart.sh and agents/run.sh share: their options, the layout for the devices that there are, and the end of all that was started.

script=$(basename "$0" .sh)
python=${VENV:-.venv}/bin/python
# torchvision's image decoder, which transformers imports and nothing here uses, does not load next to a CPU build of torch.
export PYTHONWARNINGS="ignore:Failed to load image Python extension:UserWarning${PYTHONWARNINGS:+,$PYTHONWARNINGS}"

fail() {
    printf '%s: %s\n' "$script" "$*" >&2
    exit 2
}

# The comment at the top of the script.
usage() {
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
}

# Reads seed, dry_run, overrides, and names: all other words.
read_options() {
    seed=1 dry_run='' overrides=() names=()
    while [ $# -gt 0 ]; do
        case $1 in
            --seed)
                [[ ${2:-} =~ ^[0-9]+$ ]] || fail "--seed got '${2:-}', needs a whole number, as in --seed 2"
                seed=$2
                shift
                ;;
            --seed=*) set -- --seed "${1#--seed=}" "${@:2}" && continue ;;
            --dry-run) dry_run=yes ;;
            -h | --help) usage && exit ;;
            -*) fail "'$1' is not known, needs --seed N, --dry-run or section.key=value (bash $0 --help)" ;;
            *=*) overrides+=("$1") ;;
            *) names+=("$1") ;;
        esac
        shift
    done
}

num_gpus() {
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true
    else
        nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
    fi
}

# Two ranks and an engine take three GPUs. Where there are fewer, one rank trains, and shares the only one with the engine.
sft_layout=() grpo_layout=()
case $(num_gpus) in
    1) sft_layout=(training.topology.num_ranks=1) grpo_layout=(training.topology.num_ranks=1 runtime.colocate=true) ;;
    2) sft_layout=(training.topology.num_ranks=1) grpo_layout=(training.topology.num_ranks=1) ;;
esac

# Runs a command in a process group of its own, so that an interruption is passed on once and the command can stop what it started.
child=
run() {
    if [ -n "$dry_run" ]; then
        printf '%s\n' "$(printf '%q ' "$@")"
        return
    fi
    local status=0
    set -m
    "$@" &
    child=$!
    set +m
    wait "$child" || status=$?
    child=
    return "$status"
}

stop_child() {
    [ -n "$child" ] || return 0
    printf '\n%s: stopping\n' "$script" >&2
    kill -INT "$child" 2>/dev/null || true
    for _ in $(seq 60); do
        kill -0 "$child" 2>/dev/null || return 0
        sleep 0.5
    done
    kill -KILL -- "-$child" 2>/dev/null || true
}
trap stop_child EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

phase() {
    [ -n "$dry_run" ] || printf '\n== %s\n' "$1"
}

timed_run() {
    local name=$1 begin=$EPOCHREALTIME milliseconds
    shift
    run "$@"
    milliseconds=$(((${EPOCHREALTIME/[.,]/} - ${begin/[.,]/}) / 1000)) # the decimal sign depends on the locale
    seconds+=(--seconds "$name=$((milliseconds / 1000)).$(printf '%03d' $((milliseconds % 1000)))")
}
seconds=()
