# shellcheck shell=bash
# What the scripts beside this file share: their options, Ray on several nodes, and the end of everything that was started.
#
# Options
#   --model PATH         Hugging Face directory of the policy (model.path)
#   --data PATH          training problems: JSON lines or parquet with prompt and label (data.train); --eval PATH: held-out ones
#   --directory PATH     where the run is written (run.directory)
#   --nodes N            nodes to use (runtime.cluster.num_nodes). Ranks and engines of the YAML file grow with a multiple of its nodes;
#                        any other number has to be filled by overrides, which the check names
#   --ray-address H:P    use this Ray cluster and leave it running; without it the script starts Ray, and stops it at the end
#   --interface NAME     network interface of every node on which ranks and engines meet (runtime.network_interface) and Ray listens;
#                        without it Ray takes this node's first address, or the one in RAY_HEAD_IP
#   --resume             continue the run in --directory, or start it: one command for both; exit status 75 asks for it again
#   --dry-run            print settings, placement and memory plan; needs the model's config.json, but no GPU, weights or data
#   section.key=value    any setting of the YAML file beside the script

here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
script=$(basename "$0")
python=${VENV:-$here/../../.venv}/bin/python
# For every Ray node. Megatron overlaps best with one queue per GPU; Ray would give its workers the lowest priority.
ray_environment=(CUDA_DEVICE_MAX_CONNECTIONS=1 RAY_worker_niceness=0 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0)

fail() {
    printf '%s: %s\n' "$script" "$*" >&2
    exit 2
}

usage() {
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    sed -n '/^# Options/,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
}

# node_address INTERFACE [command that runs another there]: the address of that interface, or the first one when it is empty.
node_address() {
    local name=$1
    shift
    if [ -n "$name" ]; then
        "$@" ip -4 -o address show dev "$name" | sed -n 's#.* inet \([0-9.]*\)/.*#\1#p' | head -n 1 || true
    else
        "$@" hostname -I | cut -d ' ' -f 1
    fi
}

# Fills `overrides`, `num_nodes`, `ray_address`, `resume` and `dry_run` from the words of the command line.
read_options() {
    overrides=() ray_address='' interface='' dry_run='' resume=()
    while [ $# -gt 0 ]; do
        case $1 in
            --model | --data | --eval | --directory | --nodes | --ray-address | --interface)
                [ -n "${2:-}" ] || fail "$1 needs a value (bash $script --help)"
                ;;
        esac
        case $1 in
            --model) overrides+=("model.path=$2") && shift ;;
            --data) overrides+=("data.train=$2") && shift ;;
            --eval) overrides+=("eval.sets.held_out=$2") && shift ;;
            --directory) overrides+=("run.directory=$2") && shift ;;
            --nodes) overrides+=("runtime.cluster.num_nodes=$2") && num_nodes=$2 && shift ;;
            --ray-address) ray_address=$2 && shift ;;
            --interface) overrides+=("runtime.network_interface=$2") && interface=$2 && shift ;;
            --resume) resume=(--resume) ;;
            --dry-run) dry_run=yes ;;
            -h | --help) usage && exit ;;
            runtime.cluster.num_nodes=*) overrides+=("$1") && num_nodes=${1#*=} ;;
            *=*) overrides+=("$1") ;;
            *) fail "'$1' is not known (bash $script --help)" ;;
        esac
        shift
    done
}

# The number that a settings file gives for KEY: number_in FILE KEY
number_in() {
    sed -n "s/.*\b$2: *\([0-9][0-9]*\).*/\1/p" "$1"
}

# More nodes than those of the settings file are filled by as many times its data-parallel ranks and its engines. What the user sets wins.
fill_nodes() {
    local config=$1 planned ranks engines factor
    planned=$(number_in "$config" num_nodes)
    [[ $num_nodes =~ ^[1-9][0-9]*$ ]] && [ "$num_nodes" -gt "$planned" ] && [ $((num_nodes % planned)) -eq 0 ] || return 0
    factor=$((num_nodes / planned))
    ranks=$((factor * $(number_in "$config" num_ranks))) engines=$((factor * $(number_in "$config" num_engines)))
    printf '%s: %s nodes are %s times those of %s, so %s ranks and %s engines\n' \
        "$script" "$num_nodes" "$factor" "$(basename "$config")" "$ranks" "$engines" >&2
    overrides=("training.topology.num_ranks=$ranks" "rollout.num_engines=$engines" "${overrides[@]}")
}

# Runs a command in the background and in a process group of its own, so that it can be stopped with everything that it started.
children=()
start() {
    set -m
    "$@" &
    set +m
    children+=($!)
}

# Waits for the last of the children and returns its status. TERM goes on to it: training leaves a checkpoint then, and a status that says so.
await_last() {
    local child=${children[-1]} asked status
    trap 'asked=yes; kill -TERM "$child" 2>/dev/null || true' TERM HUP
    while :; do
        asked='' status=0
        wait "$child" || status=$?
        # A signal ends the wait before the child ends.
        [ -n "$asked" ] || return "$status"
    done
}

stop_children() {
    local child
    for ((i = ${#children[@]} - 1; i >= 0; i--)); do
        child=${children[i]}
        kill -0 "$child" 2>/dev/null || continue
        kill -TERM "$child" 2>/dev/null || true
        for _ in $(seq 120); do
            kill -0 "$child" 2>/dev/null || break
            sleep 0.5
        done
        kill -KILL -- "-$child" 2>/dev/null || true
    done
    children=()
}

# What puts this node, and any other, into the cluster at ADDRESS.
ray_head() {
    exec env RAY_AUTH_MODE=token "${ray_environment[@]}" "$(dirname "$python")/ray" start --head --node-ip-address="${1%:*}" --port="${1##*:}" \
        --include-dashboard=false --disable-usage-stats --block
}

ray_worker_line() {
    local own=''
    [ -z "$interface" ] || own=" --node-ip-address=THE_ADDRESS_OF_ITS_OWN_$interface"
    echo "env RAY_AUTH_MODE=token ${ray_environment[*]} ray start --address=$1$own --disable-usage-stats --block"
}

# Waits until so many nodes are in the cluster, or until one of the processes that were started for it ends.
await_nodes() {
    start "$python" -m megatron_rl.runtime.await_nodes "$@"
    wait -n "${children[@]}"
}

# Starts Ray's head on this node and waits until the others have joined it.
start_cluster() {
    local log=${TMPDIR:-/tmp}/megatron-rl-ray-head-$$.log
    local head=${RAY_HEAD_IP:-$(node_address "$interface")}
    [ -n "$head" ] || fail "this node has no address${interface:+ on the network interface $interface}; give another --interface, or RAY_HEAD_IP"
    ray_address=$head:${RAY_PORT:-6379}
    # Only who knows the token in ~/.ray/auth_token may use this Ray.
    "$(dirname "$python")/ray" get-auth-token --generate >/dev/null || fail "Ray gave no token, see above"
    start ray_head "$ray_address" >"$log" 2>&1
    cat <<MESSAGE
Ray's head starts on this node, with its output in $log.
Now join $((num_nodes - 1)) other nodes, each with this environment and this node's ~/.ray/auth_token; where \`megatron-rl doctor\` finds nothing:

    $(ray_worker_line "$ray_address")

MESSAGE
    export RAY_AUTH_MODE=token
    await_nodes "$ray_address" "$num_nodes" || fail "Ray did not come up on $num_nodes nodes; its output is in $log"
}

# launch CONFIG.yaml [the script's arguments]: what every script ends with.
launch() {
    local config=$here/$1 status=0
    shift
    [ -x "$python" ] || fail "$python does not exist; run bash tools/setup_env.sh once, or set VENV to the environment to use"
    # What was installed beside the interpreter is found without activating its environment: SGLang compiles kernels with ninja.
    PATH=$(cd "$(dirname "$python")" && pwd):$PATH
    export PATH
    num_nodes=$(number_in "$config" num_nodes)
    read_options "$@"
    fill_nodes "$config"
    if [ -n "$dry_run" ]; then
        exec "$python" -m megatron_rl train "$config" "${overrides[@]}" --check --config-only
    fi
    [[ $num_nodes =~ ^[1-9][0-9]*$ ]] || fail "the number of nodes is '$num_nodes', needs a number above 0 to wait for them; set it with --nodes"
    if [ -z "$ray_address" ]; then
        [ -n "$(nvidia-smi -L 2>/dev/null)" ] || fail "this machine has no GPU; start on a GPU node, name a Ray cluster with --ray-address, or look at the plan with --dry-run"
    fi
    trap stop_children EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    export "${ray_environment[@]}"
    if [ "$num_nodes" -gt 1 ] && [ -z "$ray_address" ]; then
        start_cluster
    fi
    start "$python" -m megatron_rl train "$config" "${overrides[@]}" "${resume[@]}" ${ray_address:+--ray-address "$ray_address"}
    await_last || status=$?
    exit "$status"
}
