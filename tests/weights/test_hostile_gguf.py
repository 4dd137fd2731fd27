"""The GGUF reader on damaged and hostile files: a specific error, fast, in little memory."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from caudal.errors import CaudalError, ModelFileError, UnsupportedModelError
from caudal.weights.dequant import dequantize
from caudal.weights.gguf import GGMLType, GGUFFile
from caudal.weights.gguf_header import MAX_TOTAL_STRINGS, ValueType
from caudal.weights.model_config import read_model_config
from tests.tiny_models import make_tiny_model
from tests.weights.gguf_writer import (
    pack_pair,
    pack_preamble,
    pack_string,
    pack_tensor_info,
    write_gguf,
)

MAX_SECONDS = 1.0
MAX_BYTES = 4 << 20
"""Interpreter and reader together; the hostile files are smaller, what they declare is not."""

ARCH = pack_pair("general.architecture", "llama")
HUGE = 2**63 - 1


@contextmanager
def bounded_memory(max_bytes: int = MAX_BYTES) -> Iterator[None]:
    """Fails the test if the block allocates too much at any time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < max_bytes
    finally:
        tracemalloc.stop()


@contextmanager
def bounded() -> Iterator[None]:
    """Fails the test if the block takes a second of CPU or allocates too much."""
    started = time.process_time()
    with bounded_memory():
        yield
    assert time.process_time() - started < MAX_SECONDS


def _pair(key: str, tag: int, payload: bytes) -> bytes:
    return pack_string(key) + struct.pack("<I", tag) + payload


def _array(element: int, count: int, payload: bytes = b"") -> bytes:
    return _pair("k", ValueType.ARRAY, struct.pack("<IQ", element, count) + payload)


def _with_pairs(*pairs: bytes) -> bytes:
    return pack_preamble(0, len(pairs)) + b"".join(pairs)


def _with_tensors(*infos: bytes, data: int = 4096, pairs: bytes = b"", num_pairs: int = 0) -> bytes:
    header = pack_preamble(len(infos), num_pairs) + pairs + b"".join(infos)
    return header + bytes(-len(header) % 32) + bytes(data)


FULL = pack_tensor_info("t", (32, 2), GGMLType.F32, 0)
NUM_DIMS = struct.pack("<I", 2)

HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "the file is empty"),
    "half a magic": (b"GG", "magic needs 4 bytes"),
    "another format": (b"PK\3\4" + bytes(64), "not a GGUF file"),
    "magic only": (b"GGUF", "version needs 4 bytes"),
    "version 1": (b"GGUF" + struct.pack("<I", 1) + bytes(64), "version 1 is not supported"),
    "version 4": (pack_preamble(0, 0, version=4), "version 4 is not supported"),
    "version 0": (pack_preamble(0, 0, version=0), "version 0 is not supported"),
    "big-endian version": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "big-endian magic": (b"FUGG" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "no counts": (b"GGUF" + struct.pack("<I", 3), "number of tensors needs 8 bytes"),
    "huge number of tensors": (pack_preamble(HUGE, 0), "tensors declared; the limit"),
    "huge number of pairs": (pack_preamble(0, HUGE), "metadata pairs declared; the limit"),
    "negative number of pairs": (
        b"GGUF" + struct.pack("<Iqq", 3, 0, -1),
        "metadata pairs declared; the limit",
    ),
    "pairs missing": (pack_preamble(0, 1), "key of metadata pair 0 needs 8 bytes"),
    "key length huge": (_with_pairs(struct.pack("<Q", HUGE)), "key of metadata pair 0 is"),
    "key length negative": (_with_pairs(struct.pack("<q", -1)), "key of metadata pair 0 is"),
    "key beyond the file": (_with_pairs(struct.pack("<Q", 60000)), "needs 60000 bytes"),
    "key not utf-8": (_with_pairs(pack_pair("a", 1).replace(b"a", b"\xff")), "not valid UTF-8"),
    "key empty": (_with_pairs(pack_pair("", 1)), "empty key"),
    "key twice": (_with_pairs(ARCH, ARCH), "'general.architecture' appears twice"),
    "value type unknown": (_with_pairs(_pair("k", 13, bytes(8))), "'k' has unknown value type 13"),
    "value missing": (_with_pairs(_pair("k", ValueType.UINT64, b"\0")), "'k' needs 8 bytes"),
    "bool of 2": (_with_pairs(_pair("k", ValueType.BOOL, b"\2")), "must be 0 or 1, got 2"),
    "string length huge": (
        _with_pairs(_pair("k", ValueType.STRING, struct.pack("<Q", HUGE))),
        "'k' is 9223372036854775807 bytes long",
    ),
    "string not utf-8": (_with_pairs(pack_pair("k", b"\xc3\x28")), "'k' is not valid UTF-8"),
    "array type unknown": (_with_pairs(_array(99, 1)), "'k' has unknown value type 99"),
    "array of arrays": (
        _with_pairs(_array(ValueType.ARRAY, 1, struct.pack("<IQ", 4, 0))),
        "array of arrays",
    ),
    "array count huge": (_with_pairs(_array(ValueType.UINT64, HUGE)), "'k' .* needs"),
    "array count overflowing": (_with_pairs(_array(ValueType.UINT64, 2**61)), "'k' .* needs"),
    "array count negative": (_with_pairs(_array(ValueType.UINT8, 2**64 - 1)), "'k' .* needs"),
    "bool array of 3": (_with_pairs(_array(ValueType.BOOL, 2, b"\0\3")), "must be 0 or 1, got 3"),
    "string count huge": (_with_pairs(_array(ValueType.STRING, HUGE)), "strings; the limit"),
    "string count beyond the file": (
        _with_pairs(_array(ValueType.STRING, 1_000_000)),
        "1000000 strings",
    ),
    "array string length huge": (
        _with_pairs(_array(ValueType.STRING, 2, struct.pack("<QQ", HUGE, 0))),
        "string [01] of 2 runs past the end",
    ),
    "array string length near 2^64": (
        _with_pairs(_array(ValueType.STRING, 2, struct.pack("<QQ", 2**64 - 8, 0))),
        "string [01] of 2 runs past the end",
    ),
    "last array string beyond the file": (
        _with_pairs(_array(ValueType.STRING, 1, struct.pack("<Q", 1))),
        "string 0 of 1 runs past the end",
    ),
    "tensor name huge": (_with_tensors(struct.pack("<Q", 5000), data=9000), "limit is 1024"),
    "tensor name empty": (
        _with_tensors(pack_tensor_info("", (32,), 0, 0)),
        "tensor 0 has an empty name",
    ),
    "tensor name not utf-8": (
        _with_tensors(FULL.replace(b"t", b"\xff", 1)),
        "name of tensor 0 is not valid UTF-8",
    ),
    "no dimensions": (_with_tensors(pack_tensor_info("t", (), 0, 0)), "'t' has 0 dimensions"),
    "five dimensions": (_with_tensors(pack_tensor_info("t", (1,) * 5, 0, 0)), "has 5 dimensions"),
    "4 billion dimensions": (
        _with_tensors(pack_string("t") + struct.pack("<I", 2**32 - 1)),
        "has 4294967295 dimensions",
    ),
    "dimension of zero": (_with_tensors(pack_tensor_info("t", (32, 0), 0, 0)), "of size 0"),
    "product of dimensions overflows": (
        _with_tensors(pack_tensor_info("t", (2**32, 2**32), 0, 0)),
        "'t' .* ends at byte",
    ),
    "product wraps to a small number": (
        _with_tensors(pack_tensor_info("t", (2**62, 4, 1, 1), 0, 0)),
        "'t' .* ends at byte",
    ),
    "row not whole blocks": (
        _with_tensors(pack_tensor_info("t", (48,), GGMLType.Q4_0, 0)),
        "row length 48 is not a multiple of the Q4_0 block size 32",
    ),
    "row not whole K blocks": (
        _with_tensors(pack_tensor_info("t", (128, 2), GGMLType.Q4_K, 0)),
        "row length 128 is not a multiple of the Q4_K block size 256",
    ),
    "offset unaligned": (_with_tensors(pack_tensor_info("t", (8,), 0, 4)), "offset 4 is not a"),
    "offset beyond the file": (
        _with_tensors(pack_tensor_info("t", (8,), 0, 8192)),
        "'t' .* ends at byte",
    ),
    "offset near 2^64": (
        _with_tensors(pack_tensor_info("t", (8,), 0, 2**64 - 32)),
        "'t' .* ends at byte",
    ),
    "data cut short": (_with_tensors(FULL, data=255), "'t' .* ends at byte .*truncated download"),
    "tensor twice": (_with_tensors(FULL, FULL), "'t' appears twice"),
    "tensors overlap": (
        _with_tensors(FULL, pack_tensor_info("u", (8,), GGMLType.F32, 224)),
        "'t' and 'u' overlap",
    ),
    "tensor inside another": (
        _with_tensors(FULL, pack_tensor_info("u", (8,), GGMLType.F32, 0)),
        "overlap",
    ),
    "info cut in the dimensions": (
        pack_preamble(1, 0) + pack_string("t") + NUM_DIMS + bytes(8),
        "'t': dimensions needs 16 bytes",
    ),
    "alignment of zero": (
        _with_tensors(FULL, pairs=pack_pair("general.alignment", 0), num_pairs=1),
        "'general.alignment' must be a power of two, got 0",
    ),
    "alignment not a power of two": (
        _with_tensors(FULL, pairs=pack_pair("general.alignment", 48), num_pairs=1),
        "'general.alignment' must be a power of two, got 48",
    ),
    "alignment as text": (
        _with_tensors(FULL, pairs=pack_pair("general.alignment", "32"), num_pairs=1),
        "'general.alignment' must be a power of two, got 32",
    ),
    "alignment of 2 GiB": (
        _with_tensors(FULL, pairs=pack_pair("general.alignment", 2**31), num_pairs=1),
        "'t' .* ends at byte",
    ),
    # One tensor without a name, of dimensions 1 x 0, and the end of the file in its type.
    "dimensions 1 x 0 in 48 bytes": (
        b"GGUF"
        + struct.pack("<I", 3)
        + struct.pack("<q", 1)
        + struct.pack("<q", 0)
        + struct.pack("<q", 0)
        + struct.pack("<I", 2)
        + struct.pack("<q", 1)
        + struct.pack("<q", 0),
        "tensor 0 has a dimension of size 0",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_refused_specifically(tmp_path: Path, name: str) -> None:
    """B97 is the last of them."""
    content, message = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with bounded(), pytest.raises(ModelFileError, match=message):
        GGUFFile.open(path)


@pytest.mark.parametrize(("number", "message"), [(4, "Q4_2"), (31, "Q4_0_4_4"), (99, "number 99")])
def test_unknown_tensor_type_is_refused(tmp_path: Path, number: int, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(_with_tensors(pack_tensor_info("t", (32,), number, 0)))
    with bounded(), pytest.raises(UnsupportedModelError, match=f"'t' .*{message}.*Q4_K"):
        GGUFFile.open(path)


def test_invalid_utf8_in_a_token_names_the_token(tmp_path: Path) -> None:
    tokens = [b"a"] * 70_000
    tokens[65_537] = b"\xe4"
    path = write_gguf(tmp_path / "m.gguf", {"tokens": list(tokens)}, {})
    with GGUFFile.open(path) as gguf, pytest.raises(ModelFileError, match=r"'tokens'\[65537\]"):
        gguf.metadata["tokens"]


def test_unreadable_paths_are_model_file_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="No such file"):
        GGUFFile.open(tmp_path / "none.gguf")
    with pytest.raises(ModelFileError, match="Is a directory"):
        GGUFFile.open(tmp_path)


def test_names_in_messages_are_escaped_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    key = "\x1b[31m" + "x" * 60_000
    path.write_bytes(_with_pairs(pack_pair(key, 1), pack_pair(key, 1)))
    with pytest.raises(ModelFileError, match="appears twice") as caught:
        GGUFFile.open(path)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 200


def _many_empty_strings(path: Path, count: int) -> Path:
    with path.open("wb") as file:
        file.write(_with_pairs(_array(ValueType.STRING, count)))
        file.truncate(file.tell() + 8 * count)
    return path


def test_most_strings_that_are_accepted_take_under_a_second(tmp_path: Path) -> None:
    path = _many_empty_strings(tmp_path / "model.gguf", MAX_TOTAL_STRINGS)
    started = time.process_time()
    with GGUFFile.open(path) as gguf:
        assert gguf.array_length("k") == MAX_TOTAL_STRINGS
    assert time.process_time() - started < MAX_SECONDS


def test_string_array_takes_no_more_memory_than_the_file(tmp_path: Path) -> None:
    count = 100_000
    path = _many_empty_strings(tmp_path / "model.gguf", count)
    with bounded_memory(max_bytes=8 * count * 9 // 8 + 100_000), GGUFFile.open(path) as gguf:
        assert gguf.array_length("k") == count


def test_sparse_giant_header_stops_at_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    count = 1 << 34
    with path.open("wb") as file:
        file.write(_with_pairs(_array(ValueType.UINT8, count)))
        file.truncate(file.tell() + count)
    with bounded(), pytest.raises(ModelFileError, match="header would exceed 256 MiB"):
        GGUFFile.open(path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    make_tiny_model(path, "qwen2", num_merges=4, hidden=32, ffn=32, head_dim=8, num_layers=1)
    return path.read_bytes()


def _header_size(content: bytes, folder: Path) -> int:
    path = folder / "whole.gguf"
    path.write_bytes(content)
    with GGUFFile.open(path) as gguf:
        return len(content) - sum(-(-t.nbytes // 32) * 32 for t in gguf.tensors.values())


def _load(path: Path) -> str:
    """Use everything in the file; return how that ended. Other errors escape."""
    started = time.process_time()
    try:
        with GGUFFile.open(path) as gguf:
            read_model_config(gguf)
            for key in gguf.metadata:
                assert gguf.metadata[key] is not None
            for tensor in gguf.tensors.values():
                assert dequantize(tensor).shape == tensor.shape
        outcome = "loaded"
    except CaudalError as error:
        assert isinstance(error, ModelFileError | UnsupportedModelError)
        assert str(error)
        outcome = type(error).__name__
    assert time.process_time() - started < MAX_SECONDS
    return outcome


def test_truncation_at_every_byte_of_the_header_is_refused(tiny: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    header = _header_size(tiny, tmp_path)
    ends = [*range(200), *range(200, header, 7), *range(header, len(tiny), 97), len(tiny) - 33]
    for end in ends:
        path.write_bytes(tiny[:end])
        assert _load(path) == "ModelFileError", f"cut at {end}"


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_never_escapes_as_another_error(
    tiny: bytes, tmp_path: Path, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    header = _header_size(tiny, tmp_path)
    path = tmp_path / "damaged.gguf"
    outcomes: set[str] = set()
    for _ in range(400):
        damaged = bytearray(tiny)
        for _ in range(int(rng.integers(1, 4))):
            position = int(rng.integers(0, header))
            # Extreme bytes reach the length and count checks more often than random ones.
            damaged[position] = int(rng.choice([0, 1, 0x7F, 0x80, 0xFF, int(rng.integers(256))]))
        path.write_bytes(damaged)
        outcomes.add(_load(path))
    assert "ModelFileError" in outcomes
    assert "loaded" in outcomes


def test_random_damage_stays_within_memory(tiny: bytes, tmp_path: Path) -> None:
    rng = np.random.default_rng(99)
    header = _header_size(tiny, tmp_path)
    path = tmp_path / "damaged.gguf"
    with bounded_memory():
        for _ in range(60):
            damaged = bytearray(tiny)
            damaged[int(rng.integers(0, header))] = 0xFF
            path.write_bytes(damaged)
            _load(path)
