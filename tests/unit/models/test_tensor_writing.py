"""What is written without a copy is what torch and safetensors read."""

import io
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch.serialization import get_crc32_options

from megatron_rl.models.tensor_writing import raw_bytes, safetensors_header, save_tensor

FLAT = torch.arange(4096, dtype=torch.int64)
TENSORS = {
    "whole": FLAT,
    "view": FLAT[8:20].view(3, 4),
    "empty": FLAT[:0].view(0, 5),
    "column": FLAT.view(64, 64)[:, 1],
    "scalar": torch.tensor(2.5),
    "bfloat16": torch.randn(7).bfloat16()[2:],
    "parameter": torch.nn.Parameter(torch.randn(3, 2)),
}


class Stream(io.BytesIO):
    """A file that notes torch's switch as another thread finds it meanwhile, and what it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[bool] = set()
        self.addresses: set[int] = set()

    def write(self, data: Any) -> int:
        with ThreadPoolExecutor(1) as thread:
            self.seen.add(thread.submit(get_crc32_options).result())
        self.addresses.add(np.frombuffer(data, dtype=np.uint8).ctypes.data)
        return super().write(data)


@pytest.mark.parametrize("name", TENSORS)
def test_torch_reads_what_save_tensor_writes(name: str) -> None:
    stream, tensor = io.BytesIO(), TENSORS[name]
    save_tensor(tensor, stream)
    stream.seek(0)
    got = torch.load(stream, weights_only=True)
    assert torch.equal(got, tensor) and got.dtype == tensor.dtype and got.shape == tensor.shape
    assert stream.tell() < tensor.nbytes + 4000, "no more than its own numbers"


def test_numbers_are_neither_copied_nor_summed_and_nobody_elses_are_left_out() -> None:
    """In a thread that nobody has prepared."""
    stream, tensor = Stream(), FLAT[1000:3000]
    with ThreadPoolExecutor(1) as thread:
        thread.submit(save_tensor, tensor, stream).result()
    assert tensor.data_ptr() in stream.addresses
    assert stream.seen == {True} and get_crc32_options()
    (record,) = [record for record in zipfile.ZipFile(stream).infolist() if "/data/" in record.filename]
    assert zlib.crc32(raw_bytes(tensor)) != record.CRC


def test_memory_whose_bytes_are_taken_can_be_given_up_as_before() -> None:
    whole = torch.arange(6.0).view(2, 3)
    taken = raw_bytes(whole[1])
    taken[:4] = np.float32(7).tobytes()
    assert whole.tolist() == [[0, 1, 2], [7, 4, 5]] and not taken.readonly
    assert whole.untyped_storage().resizable()


def test_bytes_outlive_the_tensor_that_they_are_of() -> None:
    taken = raw_bytes(torch.full((1000,), 7.0))
    others = [torch.zeros(1000) for _ in range(20)]
    assert len(others) == 20 and np.frombuffer(taken, np.float32).tolist() == [7.0] * 1000


def test_safetensors_reads_its_header_and_the_bytes_behind() -> None:
    written = {name: tensor.detach() for name, tensor in TENSORS.items()}
    header = safetensors_header((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in written.items())
    assert len(header) % 8 == 0
    got = load(header + b"".join(map(raw_bytes, written.values())))
    assert got.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype
