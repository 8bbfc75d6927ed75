#!/usr/bin/env bash
# Creates .venv with everything that megatron_rl needs and installs this checkout into it. A second call finds it complete and returns at once.
#
#   bash tools/setup_env.sh [--rehearsal] [--check]
#
# --rehearsal   the GPU stack of Python 3.12 on a machine without a GPU, in .venv-rehearsal: tests/run.sh --wide tests what GPUs run in it
# --check       says which stack and interpreter would be taken and whether this machine can hold them; changes nothing
#
# PYTHON=python3.12     the interpreter to use (3.11 or 3.12); when not set, the first usable one, on PATH or kept by pyenv or uv
# DEVICE=cpu | gpu      the stack to install; gpu when nvidia-smi lists one
# VENV=DIR              another place than .venv; a rehearsal looks at neither
# WITHOUT_TRANSFORMER_ENGINE=1   do not build TransformerEngine on a GPU machine; attention then takes torch's path
#
# CPU: about 110 packages, 3 GB, 2 minutes plus download. GPU: about 15 GB and the time that TransformerEngine takes to compile.
# Rehearsal: 240 packages, 11 GB, 4 minutes plus download.
# What went wrong stands in .venv/setup.log. The script removes nothing that it did not create.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

repository=$PWD
stack=''                          # what is installed: cpu, gpu or rehearsal
requirements=tools/requirements
cuda_major=13       # of the torch that SGLang pins
needed_driver=580   # the oldest that runs CUDA 13
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

fail() {
    printf 'setup_env: %s\n' "$*" >&2
    exit 1
}

choose_stack() {
    if [ "$stack" = rehearsal ]; then
        reason="--rehearsal asks for it"
    elif [ -n "${DEVICE:-}" ]; then
        case $DEVICE in
            cpu | gpu) stack=$DEVICE reason="DEVICE=$DEVICE is set" ;;
            *) fail "DEVICE is '$DEVICE', needs cpu or gpu: unset it to let the machine decide" ;;
        esac
    elif command -v nvidia-smi >/dev/null && [ -n "$(nvidia-smi -L 2>/dev/null || true)" ]; then
        stack=gpu reason="nvidia-smi lists a GPU"
    else
        stack=cpu reason="nvidia-smi lists no GPU"
    fi
    venv=${VENV:-.venv}
    [ "$stack" != rehearsal ] || venv=.venv-rehearsal
    log=$venv/setup.log
    stamp=$venv/.setup_complete    # written last: the hash of everything that the environment was made from
    owned=$venv/.made_by_setup_env # written first: this script may clear the directory, for the checkout that is named in it
}

# Hash of what the environment depends on. A moved checkout counts: neither a venv nor an editable install survives that.
fingerprint() {
    {
        printf '%s\n' "$repository" "$stack"
        cat "$requirements"/*.txt setup.py tools/setup_env.sh
    } | sha256sum | cut -d ' ' -f 1
}

# A shim may exist for an interpreter that is not installed, so each candidate has to run.
usable_python() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1
}

choose_python() {
    # A newer Python brings a newer megatron-core. On GPUs that decides: before 0.19 gradient norms are wrong with TransformerEngine under
    # tensor parallel latent attention and experts. On CPU 3.11 is what everything was run on.
    local version candidate order
    case $stack in
        cpu) order=(3.11 3.12) ;;
        gpu) order=(3.12 3.11) ;;
        rehearsal) order=(3.12) ;;
    esac
    if [ -n "${PYTHON:-}" ] && [ "$stack" != rehearsal ]; then
        usable_python "$PYTHON" || fail "PYTHON=$PYTHON does not run, is not Python 3.11 or 3.12, or lacks the venv module: name another one"
        python=$PYTHON
        return
    fi
    for version in "${order[@]}"; do
        for candidate in "python$version" "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$version".*/bin/python \
            "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-${HOME:-}/.local/share}/uv/python}/cpython-$version".*/bin/python; do
            if usable_python "$candidate"; then
                python=$candidate
                return
            fi
        done
    done
    if [ "$stack" != rehearsal ] && usable_python python3; then
        python=python3
        return
    fi
    fail "found no Python ${order[0]}${order[1]:+ or ${order[1]}} with the venv module on PATH, nor among those of pyenv and uv: install one (Debian, Ubuntu: apt-get install python3-venv; anywhere: uv python install ${order[0]})${order[1]:+ or set PYTHON}"
}

# The environment's interpreter runs and is of the version that PYTHON asks for, which a rehearsal does not look at.
same_python() {
    local version='import sys; print(sys.version_info[:2])' found
    found=$("$venv/bin/python" -c "$version" 2>/dev/null) || return 1
    [ "$stack" = rehearsal ] || [ -z "${PYTHON:-}" ] || [ "$found" = "$("$PYTHON" -c "$version" 2>/dev/null)" ]
}

check_system() {
    local need_gb=6 free_gb
    [ "$(uname -s)" = Linux ] || fail "this is $(uname -s), and SGLang's server needs Linux"
    command -v lscpu >/dev/null || fail "lscpu is not on PATH and SGLang's server calls it: apt-get install util-linux"
    command -v c++ >/dev/null || command -v g++ >/dev/null ||
        fail "found no C++ compiler, which torch.compile calls inside megatron-core and SGLang: apt-get install g++"
    [ "$stack" != rehearsal ] || need_gb=14
    if [ "$stack" = gpu ]; then
        need_gb=25
        has_python_headers ||
            fail "$python has no Python.h, with which Triton compiles at the first training step and TransformerEngine when it is installed: install the headers of that Python (Debian, Ubuntu: apt-get install python3-dev, or python3.12-dev beside a python3.12)"
        check_gpu_system
    fi
    free_gb=$(($(df -Pk . | awk 'NR == 2 {print $4}') / 1048576))
    [ "$free_gb" -ge "$need_gb" ] || fail "$repository has $free_gb GB free and the $stack stack needs $need_gb: free some space or clone elsewhere"
}

# What the GPU stack cannot do without and pip does not bring: found now, not after an hour of compiling or by the first rank.
check_gpu_system() {
    local driver glibc file release
    # A program that is missing or fails says nothing, and what it was to say is then missing in a sentence below.
    glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | awk '{print $2}') || true
    at_least "${glibc:-0}" 2.34 ||
        fail "this system has glibc ${glibc:-of an unknown version}, and SGLang's wheels need 2.34 or newer: use Ubuntu 22.04, Debian 12 or a container of one"
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || true
    at_least "${driver:-0}" "$needed_driver" ||
        fail "the NVIDIA driver is ${driver:-not found}, and CUDA $cuda_major needs $needed_driver or newer: update the driver, or set DEVICE=cpu"
    # SGLang compiles kernels when it first needs them, so each node needs the toolkit; `megatron-rl doctor` looks for it there.
    toolkit=${CUDA_HOME:-${CUDA_PATH:-$(dirname "$(dirname "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")")}}
    for file in bin/nvcc lib64/libcudart.so; do
        [ -f "$toolkit/$file" ] ||
            fail "there is no $toolkit/$file, with which TransformerEngine and, at run time, SGLang's kernels are compiled: install the CUDA $cuda_major toolkit and set CUDA_HOME to it"
    done
    release=$("$toolkit/bin/nvcc" --version | sed -n 's/.*release \([0-9]*\).*/\1/p') || true
    [ "$release" = "$cuda_major" ] ||
        fail "$toolkit/bin/nvcc is of CUDA ${release:-?}, and torch of this stack is built for CUDA $cuda_major: set CUDA_HOME to a CUDA $cuda_major toolkit"
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
            fail "$venv exists, was not made by this script and holds no Python 3.11 or 3.12: move it away or set VENV to another directory"
        python=$venv/bin/python
    fi
    : >"$log"
}

# torchvision's newest usable wheel is for Python <= 3.11; on 3.12 pip has to be told to take that one (see torchvision.txt).
install_torchvision() {
    local target=()
    if has_python_312; then
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

has_python_312() {
    "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'
}

# All that gpu.txt brings. The tests ran on Python 3.12; on 3.11, where some of those versions do not exist, pip resolves freely.
install_rehearsal() {
    local tested=()
    ! has_python_312 || tested=(-c "$requirements/gpu-constraints.txt")
    step 'packages' "${pip[@]}" "${tested[@]}" -r "$requirements/gpu.txt" -r "$requirements/test.txt"
}

# TransformerEngine beside it, which cannot be compiled everywhere; the tests of a rehearsal fetch its Python half.
install_gpu() {
    install_rehearsal
    if [ -z "${WITHOUT_TRANSFORMER_ENGINE:-}" ]; then
        # Compiled against the installed torch, so what the build needs has to be installed as well.
        step 'build needs' "${pip[@]}" -r "$requirements/gpu-build-needs.txt"
        # The headers come from torch's wheels: a toolkit has neither cuDNN's nor NCCL's, a small one has few, and the system's may be of
        # other releases than are loaded. ninja compiles files at once, where the environment has it.
        step 'TransformerEngine' env NVTE_BUILD_USE_NVIDIA_WHEELS=1 CUDA_HOME="$toolkit" \
            PATH="$(cd "$venv/bin" && pwd):$toolkit/bin:$PATH" "${pip[@]}" --no-build-isolation -r "$requirements/gpu-build.txt"
    fi
}

verify() {
    local names=(torch transformers ray megatron.core sglang)
    # Its three packages have to be of one release, which only an import finds out.
    [ "$stack" != gpu ] || [ -n "${WITHOUT_TRANSFORMER_ENGINE:-}" ] || names+=(transformer_engine.pytorch)
    env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" - "$stack" "${names[@]}" <<'PYTHON'
import importlib
import importlib.metadata
import sys

from megatron_rl.check import report
from megatron_rl.doctor.machine import check_toolchain

for module in sys.argv[2:]:
    importlib.import_module(module)
if sys.argv[1] == "gpu" and not report(check_toolchain("cuda")):
    sys.exit("what engines need at run time is missing")
for name in ("torch", "megatron-core", "sglang", "transformers", "ray"):
    print(name, importlib.metadata.version(name))
PYTHON
}

main() {
    local check='' option
    for option in "$@"; do
        case $option in
            --check) check=yes ;;
            --rehearsal) stack=rehearsal ;;
            *) fail "'$option' is not an option, needs --check, --rehearsal or nothing: settings are environment variables, see the top of this script" ;;
        esac
    done
    choose_stack
    if [ -n "$check" ]; then
        choose_python
        check_system
        printf 'environment: %s stack, because %s; %s; would go into %s\n' "$stack" "$reason" "$("$python" --version)" "$venv"
        return
    fi
    wanted=$(fingerprint)
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && same_python; then
        printf 'environment: %s is complete (%s: %s)\n' "$venv" "$stack" "$reason"
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
    printf 'environment: %s stack, because %s; %s; into %s\n' "$stack" "$reason" "$("$python" --version)" "$venv"
    # Bytecode of 25,000 files takes a minute, and most are never imported: what is, the check and the first run compile.
    pip=("$venv/bin/python" -m pip install --progress-bar off --no-compile)
    step 'build tools' "${pip[@]}" 'setuptools>=77' wheel
    "install_$stack"
    step 'megatron_rl (this checkout)' "${pip[@]}" --no-deps --no-build-isolation -e .
    step 'check' verify
    tail -n 5 "$log" | tr '\n' ',' | sed 's/^/  /; s/,$/\n/; s/,/, /g'
    printf '%s' "$wanted" >"$stamp"
    printf 'environment: ready in %d s, %s\n' "$SECONDS" "$(du -sh "$venv" | cut -f 1)"
}

main "$@"
