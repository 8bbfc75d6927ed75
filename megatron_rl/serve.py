"""An engine that serves a model directory to users: `megatron-rl serve`."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.checkpoints.megatron import is_torch_dist
from megatron_rl.checkpoints.stored_weights import names_code
from megatron_rl.config.derived import AUTO_DTYPES, start_deadline_s
from megatron_rl.config.settings import ModelSettings
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.engines.engine import Engine, EngineAddress
from megatron_rl.engines.server_args import ROUTER, check_tensor_parallel, server_arguments, validate_server_args
from megatron_rl.errors import UserError
from megatron_rl.models.config_json import read_config
from megatron_rl.system.device import local_device
from megatron_rl.system.leftovers import scratch_directory

POLL_S = 1.0


def serve(model: Path, arguments: Mapping[str, Any], *, host: str, port: int) -> None:
    """Serve the Hugging Face directory `model` until a signal ends this process.

    `model` has any number format that SGLang reads. `arguments` are the server's own.

    Raises:
        UserError: SGLang cannot read `model`, or might run code named there; an argument unknown to
            the server; a port in use.
        EngineError: the server died.
    """
    _check(model)
    if not host:
        raise UserError("--host is empty, needs an address of this machine, such as 127.0.0.1")
    if ROUTER in arguments:
        raise UserError(f"{ROUTER} is {arguments[ROUTER]!r}, needs none: serve starts one server; remove it")
    validate_server_args(arguments)
    if arguments.get("nnodes", 1) > 1:
        raise UserError(f"nnodes is {arguments['nnodes']}, needs 1: serve starts one server, here; remove it, and lower tp_size")
    check_tensor_parallel(arguments, read_config(model), origin=str(model / "config.json"))
    chats = load_tokenizer(model).chat_template is not None
    kind = local_device().kind
    with scratch_directory() as scratch:
        engine = Engine(
            server_arguments(arguments, model_path=model, device_kind=kind, dtype=AUTO_DTYPES[kind], seed=0, needs_tokenizer=True),
            log_path=scratch.path / "server.log",
            host=host,
            port=port,
        )
        print(f"starting SGLang on {model} ...", flush=True)
        try:
            print(_how_to_ask(engine.start(timeout_s=start_deadline_s(ModelSettings(path=model))), model, chats=chats), flush=True)
            while True:
                time.sleep(POLL_S)
                engine.check()
        finally:
            engine.stop()


def _check(model: Path) -> None:
    if (model / "hf" / "config.json").is_file():
        raise UserError(f"{model} is a checkpoint of a run, needs a Hugging Face directory; give {model / 'hf'}")
    if not (model / "config.json").is_file():
        raise UserError(f"{model} has no config.json, needs a Hugging Face directory with weights and tokenizer")
    if is_torch_dist(model):
        raise UserError(
            f"{model} is in Megatron's format, which SGLang does not read; make a Hugging Face directory of it by megatron-rl convert"
        )
    if names_code(model):
        raise UserError(f"config.json in {model} names code (auto_map), which SGLang might run; take auto_map out of it")


def _how_to_ask(address: EngineAddress, model: Path, *, chats: bool) -> str:
    path: str = "completions"
    asked: dict[str, Any] = {"prompt": "12+39="}
    if chats:
        path, asked = "chat/completions", {"messages": [{"role": "user", "content": "What is 12+39?"}]}
    body = json.dumps({"model": str(model), **asked, "max_tokens": 16, "temperature": 0})
    return (
        f"{model} is served at {address.url}/v1, by OpenAI's API, until Ctrl-C, to clients with its key. For example:\n"
        f"curl {address.url}/v1/{path} -H 'Authorization: Bearer {address.api_key}' -H 'Content-Type: application/json' -d '{body}'"
    )
