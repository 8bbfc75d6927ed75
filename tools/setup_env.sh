#!/usr/bin/env bash
# Creates .venv with everything that megatron_rl needs and installs this checkout into it. A second call finds it complete and returns at once.
#
#   bash tools/setup_env.sh [--check]
#
# --check   says which stack and interpreter would be taken and whether this machine can hold them; changes nothing
#
# PYTHON=python3.12     the interpreter to use (3.10, 3.11 or 3.12); when not set, the one of a complete .venv, else the first usable one
# DEVICE=cpu | gpu      the stack to install; gpu when nvidia-smi lists one
# VENV=DIR              another place than .venv
# WITHOUT_TRANSFORMER_ENGINE=1   do not build TransformerEngine on a GPU machine; attention then takes torch's path
#
# CPU: about 110 packages, 3 GB, 3 minutes plus download. GPU: about 15 GB and the time that TransformerEngine takes to compile.
# What went wrong stands in .venv/setup.log. The script removes nothing that it did not create.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

repository=$PWD
venv=${VENV:-.venv}
log=$venv/setup.log
stamp=$venv/.setup_complete       # written last: the hash of everything that the environment was made from
owned=$venv/.made_by_setup_env    # written first: this script may clear the directory, for the checkout that is named in it
requirements=tools/requirements
cuda_major=13       # of the torch that SGLang pins
needed_driver=580   # the oldest that runs CUDA 13
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

fail() {
    printf 'setup_env: %s\n' "$*" >&2
    exit 1
}

choose_device() {
    if [ -n "${DEVICE:-}" ]; then
        case $DEVICE in
            cpu | gpu) device=$DEVICE reason="DEVICE=$DEVICE is set" ;;
            *) fail "DEVICE is '$DEVICE', needs cpu or gpu: unset it to let the machine decide" ;;
        esac
    elif command -v nvidia-smi >/dev/null && [ -n "$(nvidia-smi -L 2>/dev/null || true)" ]; then
        device=gpu reason="nvidia-smi lists a GPU"
    else
        device=cpu reason="nvidia-smi lists no GPU"
    fi
}

# Hash of what the environment depends on. A moved checkout counts: neither a venv nor an editable install survives that.
fingerprint() {
    {
        printf '%s\n' "$repository" "$device"
        cat "$requirements"/*.txt setup.py tools/setup_env.sh
    } | sha256sum | cut -d ' ' -f 1
}

# A shim may exist for an interpreter that is not installed, so each candidate has to run.
usable_python() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1
}

choose_python() {
    # A newer Python brings a newer megatron-core. On GPUs that decides: before 0.19 gradient norms are wrong with TransformerEngine under
    # tensor parallel latent attention and experts. On CPU 3.11 is what everything was run on.
    local candidate order=(python3.11 python3.12 python3.10 python3)
    [ "$device" = cpu ] || order=(python3.12 python3.11 python3.10 python3)
    if [ -n "${PYTHON:-}" ]; then
        usable_python "$PYTHON" || fail "PYTHON=$PYTHON does not run, is not Python 3.10 to 3.12, or lacks the venv module: name another one"
        python=$PYTHON
        return
    fi
    for candidate in "${order[@]}"; do
        if usable_python "$candidate"; then
            python=$candidate
            return
        fi
    done
    fail "found no Python 3.10 to 3.12 with the venv module: install one (Debian, Ubuntu: apt-get install python3-venv) or set PYTHON"
}

# The environment's interpreter runs, and it is of the version that PYTHON asks for, if it asks.
same_python() {
    local version='import sys; print(sys.version_info[:2])' found
    found=$("$venv/bin/python" -c "$version" 2>/dev/null) || return 1
    [ -z "${PYTHON:-}" ] || [ "$found" = "$("$PYTHON" -c "$version" 2>/dev/null)" ]
}

check_system() {
    local need_gb=6 free_gb
    [ "$(uname -s)" = Linux ] || fail "this is $(uname -s), and SGLang's server needs Linux"
    command -v lscpu >/dev/null || fail "lscpu is not on PATH and SGLang's server calls it: apt-get install util-linux"
    command -v c++ >/dev/null || command -v g++ >/dev/null ||
        fail "found no C++ compiler, which torch.compile calls inside megatron-core and SGLang: apt-get install g++"
    if [ "$device" = gpu ]; then
        need_gb=25
        has_python_headers ||
            fail "$python has no Python.h, with which Triton compiles at the first training step and TransformerEngine when it is installed: install the headers of that Python (Debian, Ubuntu: apt-get install python3-dev, or python3.12-dev beside a python3.12)"
        check_gpu_system
    fi
    free_gb=$(($(df -Pk . | awk 'NR == 2 {print $4}') / 1048576))
    [ "$free_gb" -ge "$need_gb" ] || fail "$repository has $free_gb GB free and the $device stack needs $need_gb: free some space or clone elsewhere"
}

# What the GPU stack cannot do without and pip does not bring: found now, not after an hour of compiling or by the first rank.
check_gpu_system() {
    local driver glibc toolkit
    # A program that is missing or fails says nothing, and what it was to say is then missing in a sentence below.
    glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | awk '{print $2}') || true
    at_least "${glibc:-0}" 2.34 ||
        fail "this system has glibc ${glibc:-of an unknown version}, and SGLang's wheels need 2.34 or newer: use Ubuntu 22.04, Debian 12 or a container of one"
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || true
    at_least "${driver:-0}" "$needed_driver" ||
        fail "the NVIDIA driver is ${driver:-not found}, and CUDA $cuda_major needs $needed_driver or newer: update the driver, or set DEVICE=cpu"
    [ -z "${WITHOUT_TRANSFORMER_ENGINE:-}" ] || return 0
    command -v nvcc >/dev/null ||
        fail "nvcc is not on PATH, and TransformerEngine is compiled with it: install the CUDA $cuda_major toolkit, or set WITHOUT_TRANSFORMER_ENGINE=1"
    toolkit=$(nvcc --version | sed -n 's/.*release \([0-9]*\).*/\1/p') || true
    [ "$toolkit" = "$cuda_major" ] ||
        fail "nvcc is of CUDA ${toolkit:-?}, and torch of this stack is built for CUDA $cuda_major: put a CUDA $cuda_major toolkit first on PATH, or set WITHOUT_TRANSFORMER_ENGINE=1"
}

has_python_headers() {
    "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")))'
}

# at_least VERSION NEEDED
at_least() {
    [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]
}

# step NAME COMMAND...: runs the command with its output in the log; a line when it starts, one every 20 seconds, one when it ends.
step() {
    local name=$1 begin=$SECONDS status=0 beat last
    shift
    printf '  %-34s ' "$name"
    printf '\n== %s: %s\n' "$name" "$*" >>"$log"
    set -m # a process group of its own, so that an interruption ends the command's children too
    "$@" >>"$log" 2>&1 &
    child=$!
    set +m
    beat=0
    while kill -0 "$child" 2>/dev/null; do
        sleep 0.2
        beat=$((beat + 1))
        if [ $((beat % 100)) -eq 0 ]; then
            last=$(grep -v WARNING "$log" | tail -n 1 | tr -s ' ' | cut -c 1-80)
            printf '\n    %4d s  %5s  %-80s ' $((SECONDS - begin)) "$(du -sh "$venv" 2>/dev/null | cut -f 1)" "$last"
        fi
    done
    wait "$child" || status=$?
    child=
    if [ "$status" -ne 0 ]; then
        printf 'FAILED after %d s\n\n' $((SECONDS - begin)) >&2
        grep -v WARNING "$log" | tail -n 15 >&2
        printf '\nsetup_env: the step "%s" failed; its output is in %s.\n%s\n' "$name" "$log" "$(advice "$name")" >&2
        exit 1
    fi
    printf '%d s\n' $((SECONDS - begin))
}

advice() {
    if tail -n 40 "$log" | grep -q -i 'no space left'; then
        echo 'The disk is full: free some space, then run this script again.'
    elif tail -n 40 "$log" | grep -q -i -E 'connection|timed out|resolve|proxy|SSLError|certificate'; then
        echo 'The package index was not reached: check the network and pip config list, then run this script again; what was downloaded is kept.'
    elif [ "$1" = 'TransformerEngine' ]; then
        echo 'It is compiled with nvcc: install the CUDA toolkit of the version in torch.version.cuda, or set WITHOUT_TRANSFORMER_ENGINE=1.'
    elif tail -n 40 "$log" | grep -q -i -E 'no matching distribution|could not find a version'; then
        echo 'The package index lacks a release named above: check pip config list and the Python version, then run this script again.'
    else
        echo 'Read the lines above; running this script again starts over from a clean environment.'
    fi
}

# Two checkouts that share an environment, by VENV or a link, would clear it in turns, each under the other's processes.
check_owner() {
    local owner
    owner=$(cat "$owned" 2>/dev/null) || true
    [ -z "$owner" ] || [ "$owner" -ef "$repository" ] || [ ! -e "$owner/tools/setup_env.sh" ] ||
        fail "$venv is the environment of $owner, and one for $repository would replace it: remove the link, or set VENV to another directory"
}

# Makes the environment, or clears one that this script made and did not finish. One that somebody else made is used as it is.
make_venv() {
    if [ -e "$owned" ] || [ ! -e "$venv" ]; then
        "$python" -m venv --clear "$venv"
        printf '%s' "$repository" >"$owned"
    else
        usable_python "$venv/bin/python" ||
            fail "$venv exists, was not made by this script and holds no Python 3.10 to 3.12: move it away or set VENV to another directory"
        python=$venv/bin/python
    fi
    : >"$log"
}

# torchvision's newest usable wheel is for Python <= 3.11; on 3.12 pip has to be told to take that one (see torchvision.txt).
install_torchvision() {
    local target=()
    if "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
        target=(--target "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"
            --upgrade --only-binary=:all: --python-version 3.11 --implementation cp --abi cp311)
    fi
    "$venv/bin/python" -m pip install --no-deps "${target[@]}" -r "$requirements/torchvision.txt"
}

install_cpu() {
    step 'packages' "${pip[@]}" -c "$requirements/constraints.txt" -r "$requirements/cpu.txt" -r "$requirements/test.txt"
    step 'sglang, megatron-core' "${pip[@]}" --no-deps -r "$requirements/cpu-nodeps.txt"
    step 'torchvision' install_torchvision
}

install_gpu() {
    step 'packages' "${pip[@]}" -r "$requirements/gpu.txt" -r "$requirements/test.txt"
    if [ -z "${WITHOUT_TRANSFORMER_ENGINE:-}" ]; then
        # Compiled against the installed torch, so what the build needs has to be installed as well.
        step 'build needs' "${pip[@]}" -r "$requirements/gpu-build-needs.txt"
        step 'TransformerEngine' env CPLUS_INCLUDE_PATH="$(wheel_headers)${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}" \
            "${pip[@]}" --no-build-isolation -r "$requirements/gpu-build.txt"
    fi
}

# The headers of cuDNN and NCCL that came with torch. Where there is a toolkit TransformerEngine's build looks at that one's headers alone
# (build_tools/utils.py, get_cuda_include_dirs), and a toolkit has neither; those of the system may be of other releases than are loaded.
wheel_headers() {
    local packages
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    printf '%s:%s' "$packages/nvidia/cudnn/include" "$packages/nvidia/nccl/include"
}

verify() {
    local names=(torch transformers ray megatron.core sglang)
    # Its three packages have to be of one release, which only an import finds out.
    [ "$device" = cpu ] || [ -n "${WITHOUT_TRANSFORMER_ENGINE:-}" ] || names+=(transformer_engine.pytorch)
    "$venv/bin/python" - "${names[@]}" <<'PYTHON'
import importlib
import importlib.metadata
import sys

for module in sys.argv[1:]:
    importlib.import_module(module)
for name in ("torch", "megatron-core", "sglang", "transformers", "ray"):
    print(name, importlib.metadata.version(name))
PYTHON
}

main() {
    case ${1:-} in
        '' | --check) ;;
        *) fail "'$1' is not an option, needs --check or nothing: settings are environment variables, see the top of this script" ;;
    esac
    choose_device
    if [ "${1:-}" = --check ]; then
        choose_python
        check_system
        printf 'environment: %s stack, because %s; %s; would go into %s\n' "$device" "$reason" "$("$python" --version)" "$venv"
        return
    fi
    wanted=$(fingerprint)
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && same_python; then
        printf 'environment: %s is complete (%s: %s)\n' "$venv" "$device" "$reason"
        return
    fi

    check_owner
    choose_python
    check_system
    exec 9<tools/setup_env.sh
    flock --nonblock 9 || fail "another setup of $repository is running: wait until it is done"

    child=
    trap '[ -z "$child" ] || kill -- -"$child" 2>/dev/null || true' EXIT
    trap 'printf "\nsetup_env: interrupted; the next call starts over\n" >&2; exit 130' INT TERM
    rm -f "$stamp"
    make_venv
    printf 'environment: %s stack, because %s; %s; into %s\n' "$device" "$reason" "$("$python" --version)" "$venv"
    pip=("$venv/bin/python" -m pip install --progress-bar off)
    step 'build tools' "${pip[@]}" 'setuptools>=77' wheel
    "install_$device"
    step 'megatron_rl (this checkout)' "${pip[@]}" --no-deps --no-build-isolation -e .
    step 'check' verify
    tail -n 5 "$log" | tr '\n' ',' | sed 's/^/  /; s/,$/\n/; s/,/, /g'
    printf '%s' "$wanted" >"$stamp"
    printf 'environment: ready in %d s, %s\n' "$SECONDS" "$(du -sh "$venv" | cut -f 1)"
}

main "$@"
