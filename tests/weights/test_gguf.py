"""The GGUF reader on well-formed files."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caudal.errors import ModelFileError
from caudal.weights import gguf_header
from caudal.weights.gguf import GGMLType, GGUFFile
from caudal.weights.gguf_header import ValueType
from tests.weights.gguf_writer import Typed, quantize_q8_0, write_gguf

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "u8": Typed(ValueType.UINT8, 255),
    "i8": Typed(ValueType.INT8, -128),
    "u16": Typed(ValueType.UINT16, 65535),
    "i16": Typed(ValueType.INT16, -32768),
    "u32": Typed(ValueType.UINT32, 2**32 - 1),
    "i32": Typed(ValueType.INT32, -(2**31)),
    "u64": Typed(ValueType.UINT64, 2**64 - 1),
    "i64": Typed(ValueType.INT64, -(2**63)),
    "f32": Typed(ValueType.FLOAT32, 0.5),
    "f64": Typed(ValueType.FLOAT64, 0.1),
    "yes": True,
    "no": False,
    "text": "flüssig 漢字 🌊",
    "empty": "",
    "strings": ["a", "", "ä", "漢", "🌊", "b c"],
    "no strings": [],
    "with nul": ["a\0b", "c", "\0"],
    "ints": np.array([1, -2, 3], np.int32),
    "bytes": np.array([1, 2, 255], np.uint8),
    "floats": np.array([0.5, -0.25], np.float32),
    "flags": np.array([True, False]),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {
        "a.weight": (GGMLType.F32, rng.normal(size=(3, 5)).astype(np.float32)),
        "b.weight": (GGMLType.Q8_0, rng.normal(size=(2, 64)).astype(np.float32)),
        "c.weight": (GGMLType.F16, rng.normal(size=7).astype(np.float32)),
        "d.weight": (GGMLType.F32, rng.normal(size=(2, 3, 4, 5)).astype(np.float32)),
    }
    return write_gguf(tmp_path / "model.gguf", METADATA, tensors)


def test_every_metadata_type_is_read(path: Path) -> None:
    with GGUFFile.open(path) as gguf:
        assert list(gguf.metadata) == list(METADATA)
        for key, written in METADATA.items():
            value = gguf.metadata[key]
            expected = written.value if isinstance(written, Typed) else written
            if isinstance(expected, np.ndarray):
                assert isinstance(value, np.ndarray)
                assert value.dtype == expected.dtype
                assert value.tolist() == expected.tolist()
            else:
                assert value == expected
                assert type(value) is type(expected)
        assert gguf.architecture == "llama"


def test_tensor_data_are_views_of_the_file(path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    with GGUFFile.open(path) as gguf:
        assert list(gguf.tensors) == ["a.weight", "b.weight", "c.weight", "d.weight"]
        tensor = gguf.tensors["a.weight"]
        assert (tensor.shape, tensor.nbytes, tensor.ggml_type) == ((3, 5), 60, GGMLType.F32)
        assert not tensor.data.flags.owndata
        assert not tensor.data.flags.writeable
        np.testing.assert_array_equal(tensor.data.view("<f4").reshape(3, 5), values)
        assert gguf.tensors["d.weight"].shape == (2, 3, 4, 5)


def test_raw_blocks_survive_and_offsets_follow_the_alignment(tmp_path: Path) -> None:
    raw = quantize_q8_0(np.arange(128, dtype=np.float32).reshape(2, 64))
    tensors = dict.fromkeys(("a", "b"), (GGMLType.Q8_0, raw))
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "x"}, tensors, alignment=256)
    with GGUFFile.open(path) as gguf:
        for name in tensors:
            assert gguf.tensors[name].shape == (2, 64)
            assert gguf.tensors[name].data.tobytes() == raw.tobytes()


def test_views_outlive_close(path: Path) -> None:
    gguf = GGUFFile.open(path)
    data = gguf.tensors["b.weight"].data
    before = data.tobytes()
    gguf.close()
    gguf.close()
    assert data.tobytes() == before
    assert len(gguf.tensors) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.get_int("text"), "'text' must be int, but holds str"),
        (lambda g: g.get_int("yes"), "'yes' must be int, but holds bool"),
        (lambda g: g.get_int("f32"), "'f32' must be int, but holds float"),
        (lambda g: g.get_float("u32"), "'u32' must be float, but holds int"),
        (lambda g: g.get_str("strings"), "'strings' must be str, but holds an array of str"),
        (lambda g: g.get_bool("u8"), "'u8' must be bool, but holds int"),
        (lambda g: g.get_int("ints"), "'ints' must be int, but holds an array of int"),
        (lambda g: g.get_str("missing"), "'missing' is missing"),
        (lambda g: g.get_array("missing"), "'missing' is missing"),
        (lambda g: g.get_array("text"), "'text' must be an array, but holds str"),
        (lambda g: g.get_array("ints", "str"), "must be an array of str, but holds .* of int"),
        (lambda g: g.get_array("bytes", "float"), "must be an array of float, but holds .* of int"),
        (lambda g: g.get_array("ints", "int", length=4), "'ints' must have 4 elements, but has 3"),
        (lambda g: g.array_length("u8"), "'u8' must be an array, but holds int"),
    ],
)
def test_typed_getters_name_key_and_types(path: Path, call: Any, message: str) -> None:
    with GGUFFile.open(path) as gguf, pytest.raises(ModelFileError, match=message):
        call(gguf)


def test_typed_getters_return_values_and_defaults(path: Path) -> None:
    with GGUFFile.open(path) as gguf:
        assert gguf.get_int("u64") == 2**64 - 1
        assert gguf.get_float("f64") == 0.1
        assert gguf.get_bool("no") is False
        assert gguf.get_int("missing", default=7) == 7
        assert gguf.get_str("missing", default="x") == "x"
        assert gguf.get_array("strings", "str", length=6) == METADATA["strings"]
        assert gguf.get_array("flags", "bool").tolist() == [True, False]
        assert gguf.array_length("strings") == 6
        with pytest.raises(ModelFileError, match="'text' must be int"):
            gguf.get_int("text", default=7)


def test_string_chunks_join_without_a_seam(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "_DECODE_CHUNK", 2)
    with GGUFFile.open(path) as gguf:
        assert gguf.metadata["strings"] == METADATA["strings"]
        assert gguf.metadata["with nul"] == METADATA["with nul"]


def test_large_vocabulary_parses_in_under_a_second(tmp_path: Path) -> None:
    tokens = [f"tökén{i}" if i % 3 else f"token{i}" for i in range(262_144)]
    merges = [f"me {i}" for i in range(500_000)]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.zeros(len(tokens), np.float32),
        "tokenizer.ggml.token_type": np.ones(len(tokens), np.int32),
        "tokenizer.ggml.merges": merges,
    }
    path = write_gguf(tmp_path / "m.gguf", metadata, {})
    durations = []
    for _ in range(3):
        started = time.process_time()
        with GGUFFile.open(path) as gguf:
            decoded = (
                gguf.get_array("tokenizer.ggml.tokens"),
                gguf.metadata["tokenizer.ggml.merges"],
            )
        durations.append(time.process_time() - started)
        assert decoded == (tokens, merges)
    assert min(durations) < 1.0


def _write_splits(folder: Path, count: int = 3, **changes: Any) -> list[Path]:
    """Parts with tensors t1 … tN; `changes` maps part_key to a value, e.g. p2_no=5."""
    paths = []
    for number in range(1, count + 1):
        metadata: dict[str, Any] = {"general.architecture": "llama"} if number == 1 else {}
        values = {
            "no": number - 1,
            "count": count,
            "tensors.count": count,
        }
        for key in values:
            value = changes.get(f"p{number}_{key.split('.')[0]}", values[key])
            tag = ValueType.INT32 if key == "tensors.count" else ValueType.UINT16
            metadata[f"split.{key}"] = value if isinstance(value, str) else Typed(tag, value)
        tensor = (GGMLType.F32, np.full((2, 4), number, np.float32))
        name = str(changes.get(f"p{number}_tensor", f"t{number}"))
        paths.append(folder / f"model-{number:05d}-of-{count:05d}.gguf")
        write_gguf(paths[-1], metadata, {name: tensor})
    return paths


@pytest.mark.parametrize("part", [0, 1, 2])
def test_split_model_opens_by_any_part(tmp_path: Path, part: int) -> None:
    paths = _write_splits(tmp_path)
    with GGUFFile.open(paths[part]) as gguf:
        assert gguf.paths == tuple(paths)
        assert gguf.architecture == "llama"
        values = [tensor.data.view("<f4")[0] for tensor in gguf.tensors.values()]
        assert values == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"p2_no": 2},
            "00002-of-00003.*'split.no' and 'split.count' are 2 and 3, expected 1 and 3",
        ),
        ({"p3_count": 4}, "00003-of-00003.*are 2 and 4"),
        ({"p1_no": 1}, "'split.no' must be 0 in the first part"),
        ({"p1_tensors": 4}, "'split.tensors.count' is 4, but the 3 parts hold 3 tensors"),
        ({"p3_tensor": "t1"}, "'t1' is also in an earlier part"),
        ({"p1_count": 65535}, "'split.count' is 65535; the limit"),
        ({"p1_count": 4}, "split into 4 files, which must keep the name"),
        ({"p2_no": "x"}, "'split.no' must be an integer, got 'x'"),
    ],
)
def test_inconsistent_split_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    paths = _write_splits(tmp_path, **changes)
    with pytest.raises(ModelFileError, match=message):
        GGUFFile.open(paths[0])


def test_missing_part_is_named(tmp_path: Path) -> None:
    paths = _write_splits(tmp_path)
    paths[1].unlink()
    with pytest.raises(ModelFileError, match=r"model-00002-of-00003\.gguf: No such file"):
        GGUFFile.open(paths[0])


def test_renamed_first_part_is_refused(tmp_path: Path) -> None:
    renamed = _write_splits(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match="must keep the name"):
        GGUFFile.open(renamed)


def test_reader_imports_only_numpy() -> None:
    code = (
        "import sys; import caudal.weights.gguf, caudal.weights.model_config\n"
        "import caudal.weights.download\n"
        "slow = {'huggingface_hub', 'rich', 'httpx', 'tqdm', 'typer', 'tokenizers', 'zmq'}\n"
        "bad = slow & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
