"""`.bin` files: every dtype, view and sign that torch can save comes out bit for bit, and nothing is copied whole."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from sllm_loaderd.convert import ConvertOptions, convert_directory
from sllm_loaderd.convert.torch_files import TorchSource
from sllm_loaderd.verify import validate_checkpoint
from sllm_runtime.protocol.checkpoint import ITEM_BYTES
from sllm_runtime.protocol.errors import InvalidCheckpoint, UnsupportedModel
from tests.fixtures.examples import examples
from tests.fixtures.loaderd import SMALL_CHUNK, bound_tensors, ignore

OPTIONS = ConvertOptions(chunk_bytes=SMALL_CHUNK, min_block=0)
DTYPES = [getattr(torch, name) for name in ITEM_BYTES]
SAFETENSORS_LACKS = {torch.complex32, torch.complex128} | {dtype for dtype in DTYPES if "bits" in str(dtype)}


WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw(tensor: torch.Tensor) -> bytes:
    """Row-major bytes as torch itself makes them."""
    return bytes(plain(tensor).reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy as whole numbers of the same size; some dtypes can do nothing but be looked at otherwise."""
    signed = tensor.resolve_conj().resolve_neg()
    words = torch.view_as_real(signed) if tensor.dtype is torch.complex128 else signed
    words = words.view(WORDS[words.element_size()])
    return torch.empty(words.shape, dtype=words.dtype).copy_(words)


def read_all(source: TorchSource, name: str, window: int = 1 << 20) -> bytes:
    out = bytearray(source.tensors[name].nbytes)
    for start in range(0, len(out), window):
        source.read(name, start, memoryview(out)[start : start + window])
    return bytes(out)


def noise(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any dtype: random bits, maybe a view of a bigger storage, turned, narrowed, stepped or expanded."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    count = torch.Size(shape).numel()
    bits = noise((count + 3) * dtype.itemsize, draw(st.integers(0, 99)))
    if dtype is torch.bool:
        bits = bits & 1
    tensor = bits.view(dtype)[draw(st.integers(0, 3)) :][:count].reshape(shape)
    for _ in range(draw(st.integers(0, 3))):
        tensor = draw(st.sampled_from(views(tensor)))
    return tensor


def views(tensor: torch.Tensor) -> list[torch.Tensor]:
    found = [tensor, tensor.unsqueeze(0)]
    if tensor.dim() > 1:
        found += [tensor.transpose(0, -1), tensor.movedim(0, 1)]
    if tensor.dim() and tensor.shape[0] > 1:
        found += [tensor[1:], tensor[::2], tensor[0], tensor.diagonal() if tensor.dim() > 1 else tensor]
    if tensor.dim() < 3:
        found.append(tensor.expand(3, *tensor.shape))
    if tensor.is_complex() and tensor.dtype is not torch.complex32:
        found += [tensor.conj(), tensor.conj().imag]
    return found


NAMES = st.text(max_size=12).filter(lambda name: all(not 0xD800 <= ord(c) < 0xE000 for c in name))


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(state=st.dictionaries(NAMES, tensors(), min_size=1, max_size=4), kind=st.sampled_from(["bin", "safetensors"]))
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_what_torch_saves_is_bound_bit_for_bit(tmp_path: Path, state: dict[str, torch.Tensor], kind: str) -> None:
    source, target = tmp_path / "source", tmp_path / "checkpoint"
    for path in (source, target):
        shutil.rmtree(path, ignore_errors=True)
    source.mkdir()
    if kind == "bin":
        torch.save(state, source / "pytorch_model.bin")
    else:
        state = {
            name: plain(tensor).view(tensor.dtype)
            for name, tensor in state.items()
            if tensor.dtype not in SAFETENSORS_LACKS and (tensor.dim() or tensor.dtype is not torch.float4_e2m1fn_x2)
        }
        state["one"] = torch.ones(1)
        save_file(state, source / "model.safetensors")
    convert_directory(source, target, options=OPTIONS, verify=ignore)
    found = bound_tensors(validate_checkpoint(target))
    assert set(found) == set(state)
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert raw(found[name]) == raw(tensor)


@pytest.mark.parametrize("window", [1, 7, 64, 1000])
def test_a_view_is_read_in_windows_of_any_size(window: int, tmp_path: Path) -> None:
    base = noise(3 * 5 * 7 * 4, 1).view(torch.float32).reshape(3, 5, 7)
    state = {
        "turned": base.permute(2, 0, 1),
        "part": base[1:, ::2, 3:5],
        "row": base[1, 2],
        "wide": base.expand(2, 3, 5, 7),
    }
    torch.save(state, tmp_path / "pytorch_model.bin")
    source = TorchSource([tmp_path / "pytorch_model.bin"])
    for name, tensor in state.items():
        assert read_all(source, name, window) == raw(tensor)
    source.close()


def test_files_of_the_old_format_are_read_as_well(tmp_path: Path) -> None:
    base = noise(600, 2).view(torch.bfloat16).reshape(10, 30)
    state = {"base": base, "same": base, "turned": base.t(), "other": torch.arange(5), "none": torch.empty(0, 2)}
    path = tmp_path / "pytorch_model.bin"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    source = TorchSource([path])
    assert dict(source.ties) == {"same": "base"}
    for name in source.tensors:
        assert read_all(source, name) == raw(state[name])
    source.close()


def rewritten(path: Path, **changes: Any) -> None:
    """The zip at `path` again, with other contents for records, or another way to store them."""
    compress = changes.pop("compress", zipfile.ZIP_STORED)
    with zipfile.ZipFile(path) as archive:
        content = {info.filename: archive.read(info) for info in archive.infolist()}
    for name, data in changes.items():
        key = next(key for key in content if key.endswith("/" + name.replace("_", "/")))
        content[key] = data
    with zipfile.ZipFile(path, "w", compress) as archive:
        for name, data in content.items():
            archive.writestr(name, data)


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (UnsupportedModel, {"byteorder": b"big"}),
        (InvalidCheckpoint, {"compress": zipfile.ZIP_DEFLATED}),
        (InvalidCheckpoint, {"data_0": b"short"}),
        (InvalidCheckpoint, {"data.pkl": b"no pickle"}),
    ],
)
def test_a_file_that_lies_about_its_storages_is_refused(
    error: type[Exception], changes: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(100)}, path)
    rewritten(path, **changes)
    with pytest.raises(error, match="pytorch_model"):
        TorchSource([path])


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2000), st.integers(0, 255), st.integers(0, 400))
@example(65, 75, 0)  # a pickle protocol that torch warns of
@example(220, 75, 0)  # a storage class that torch warns of
@example(262, 0, 0)  # a shape without elements
def test_a_damaged_file_gives_a_typed_error_or_readable_tensors(
    tmp_path: Path, place: int, value: int, cut: int
) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(10), "b": torch.ones(4, 4).t()}, path)
    data = bytearray(path.read_bytes())
    data[place % len(data)] = value
    path.write_bytes(data[: len(data) - cut])
    try:
        source = TorchSource([path])
    except (InvalidCheckpoint, UnsupportedModel):
        return
    for name in source.tensors:
        read_all(source, name)
    source.close()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_module_that_was_saved_whole_is_refused_with_what_would_do(tmp_path: Path, zipped: bool) -> None:
    """Not with torch's words, which say how one may run its code."""
    path = tmp_path / "pytorch_model.bin"
    torch.save(torch.nn.Sequential(torch.nn.Linear(2, 2)), path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(InvalidCheckpoint, match=r"holds a torch\.nn.*Sequential.*state_dict") as raised:
        TorchSource([path])
    assert "weights_only" not in raised.value.message
    assert "\x1b" not in raised.value.message
