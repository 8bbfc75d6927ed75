"""What is installed on the node, against what was tested, and whether it imports."""

import importlib.metadata
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from megatron_rl.acceptance.judging import Line, broken, cudnn_version, judged, library_problems, pinned_here
from megatron_rl.acceptance.node import Node
from megatron_rl.device import chosen_backends
from megatron_rl.doctor import IMPORTS, Finding, check_import, check_package, check_python
from megatron_rl.versions import installed_version, known_releases, transformer_engine_release

NVIDIA_SMI_TIMEOUT_S = 30.0


def versions(node: Node) -> Iterator[Line]:
    """Releases that were tested, each of which imports, with the libraries that they were made for."""
    findings = [check_python(), *(check_package(release, installed_version(release.distribution)) for release in known_releases(node.kind))]
    modules = list(IMPORTS)
    found, problems = dict(chosen_backends()), list[str]()
    found |= {name: installed_version(name) or "not installed" for name in ("sglang", "ray", "transformers")}
    if node.kind == "cuda":
        findings.append(_transformer_engine())
        modules.append("transformer_engine.pytorch")
        libraries = _loaded_libraries()
        problems = library_problems(libraries, pinned_here())
        found |= libraries
    with ThreadPoolExecutor(len(modules)) as pool:
        findings += pool.map(check_import, modules)
    number = ", ".join(f"{name} {version}" for name, version in found.items())
    yield judged("versions and imports", number, [*broken(findings), *problems])


def _transformer_engine() -> Finding:
    """Of the release that fits megatron-core's: a run can do without it, but then nothing here would try its kernels."""
    fix = "DEVICE=gpu bash tools/setup_env.sh"
    release = transformer_engine_release()
    try:
        installed = importlib.metadata.version(release.distribution)
    except importlib.metadata.PackageNotFoundError:
        return Finding(release.distribution, "broken", "not installed, so its kernels are not tried", fix)
    level = check_package(release, installed).level
    return Finding(release.distribution, level, f"{installed}, needs {release.accepted}", fix)


def _loaded_libraries() -> dict[str, str]:
    program = shutil.which("nvidia-smi") or "nvidia-smi"
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True).stdout
    return {
        "driver": said.splitlines()[0].strip(),
        "CUDA": str(torch.version.cuda),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "cuDNN": cudnn_version(torch.backends.cudnn.version() or 0),
    }
