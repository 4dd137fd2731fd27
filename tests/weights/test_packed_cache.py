"""Packed weights between starts: shared when valid, made anew when not, never in the way."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from caudal.models.registry import create_model
from caudal.ops.cpu import CpuBackend
from caudal.ops.interface import PackedSegment
from caudal.weights import packed_cache, packed_file
from caudal.weights.ggml_types import GGMLType
from caudal.weights.gguf import GGUFFile
from caudal.weights.loader import WeightLoader
from caudal.weights.model_config import read_model_config
from caudal.weights.packed_cache import CacheLimits, PackedCache, PackedWeights
from tests.tiny_models import make_tiny_model

LIMITS = CacheLimits(min_weights_bytes=0, min_free_bytes=0)


@dataclass
class Loaded:
    """What a start made of a model file."""

    packed: PackedWeights
    values: list[np.ndarray]

    @property
    def is_from_cache(self) -> bool:
        return self.packed.is_complete


def load(model: Path, directory: Path, limits: CacheLimits = LIMITS) -> Loaded:
    backend = CpuBackend(1, "ref")
    with GGUFFile.open(model) as gguf:
        packed = PackedCache(directory, limits).open(gguf, backend)
        assert packed is not None
        loader = WeightLoader(gguf.tensors, backend, packed=packed)
        network = create_model(read_model_config(gguf), loader)
    weights = [network.embedding, network.lm_head]
    for layer in network.layers:
        weights += [layer.qkv, layer.attn_output, layer.gate_up, layer.ffn_down]
    return Loaded(packed, [weight.unpack() for weight in weights])


def start(model: Path, directory: Path, limits: CacheLimits = LIMITS) -> Loaded:
    """Load and keep, as an engine does."""
    loaded = load(model, directory, limits)
    loaded.packed.store()
    return loaded


def entries(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.packed"))


def assert_same(left: Loaded, right: Loaded) -> None:
    for a, b in zip(left.values, right.values, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model.gguf")


@pytest.fixture
def kept(model: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(model, directory with its entry)."""
    start(model, tmp_path / "packed")
    return model, tmp_path / "packed"


@pytest.fixture(params=[True, False], ids=["huge", "small"])
def is_huge(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether the system keeps the file in huge pages."""
    monkeypatch.setattr(packed_file, "_is_in_huge_pages", lambda _blocks: request.param)
    yield request.param


@pytest.mark.parametrize("linear_type", [GGMLType.Q4_1, GGMLType.Q8_0, GGMLType.F16, GGMLType.BF16])
@pytest.mark.usefixtures("is_huge")
def test_second_start_uses_what_the_first_packed(linear_type: GGMLType, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m.gguf", arch="qwen2", linear_type=linear_type)
    first = start(model, tmp_path / "packed")
    second = start(model, tmp_path / "packed")
    assert not first.is_from_cache
    assert second.is_from_cache
    assert_same(first, second)
    assert len(entries(tmp_path / "packed")) == 1


def test_weights_stay_usable_when_the_entry_is_deleted_under_a_running_engine(
    kept: tuple[Path, Path],
) -> None:
    model, directory = kept
    loaded = load(model, directory)
    shutil.rmtree(directory)
    again = load(model, directory)
    assert not again.is_from_cache
    assert_same(loaded, again)


def change_weight(model: Path) -> None:
    """Overwrite in place; the size stays, and the time is set back."""
    stat = model.stat()
    data = bytearray(model.read_bytes())
    data[-100] ^= 0xFF
    model.write_bytes(data)
    os.utime(model, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def touch(model: Path) -> None:
    os.utime(model, ns=(1, 1))


def replace(model: Path) -> None:
    make_tiny_model(model, seed=1)


@pytest.mark.parametrize("change", [change_weight, touch, replace])
def test_another_model_file_never_gets_the_old_weights(
    change: object, kept: tuple[Path, Path]
) -> None:
    assert callable(change)
    model, directory = kept
    change(model)
    loaded = start(model, directory)
    assert not loaded.is_from_cache
    assert_same(loaded, load(model, directory))
    assert len(entries(directory)) == 1


def test_other_kernels_get_an_entry_of_their_own(kept: tuple[Path, Path]) -> None:
    model, directory = kept

    class Rebuilt(CpuBackend):
        def packed_layout(self) -> str:
            return "rebuilt"

    with GGUFFile.open(model) as gguf:
        packed = PackedCache(directory, LIMITS).open(gguf, Rebuilt(1, "ref"))
    assert packed is not None
    assert not packed.is_complete
    assert load(model, directory).is_from_cache


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def empty(data: bytes) -> bytes:
    return b""


def without_trailer(data: bytes) -> bytes:
    return data[:-1]


def damage_first_byte(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def damage_header(data: bytes) -> bytes:
    return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]


def damage_length(data: bytes) -> bytes:
    return data[:-40] + b"\xff" * 8 + data[-32:]


def damage_version(data: bytes) -> bytes:
    return data[:-48] + b"\x07" + data[-47:]


def zeros(data: bytes) -> bytes:
    return bytes(len(data))


@pytest.mark.parametrize(
    "damage",
    [
        *(cut, empty, without_trailer, damage_first_byte),
        *(damage_header, damage_length, damage_version, zeros),
    ],
)
def test_damaged_entry_is_replaced_with_a_warning(
    damage: object, kept: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(damage)
    model, directory = kept
    (entry,) = entries(directory)
    stat = entry.stat()
    entry.write_bytes(damage(entry.read_bytes()))
    os.utime(entry, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the seal looks unbroken
    loaded = start(model, directory)
    assert not loaded.is_from_cache
    assert "made anew" in caplog.text
    assert load(model, directory).is_from_cache


def test_a_flipped_bit_anywhere_is_found_once_the_seal_is_broken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_tiny_model(tmp_path / "m.gguf", hidden=512, num_heads=16)
    first = start(model, tmp_path / "packed")
    (entry,) = entries(tmp_path / "packed")
    data = bytearray(entry.read_bytes())
    data[6000] ^= 1  # behind the sample at the segment's start
    entry.write_bytes(data)
    again = start(model, tmp_path / "packed")
    assert not again.is_from_cache
    assert "checksum" in caplog.text
    assert_same(first, again)


def test_copied_entry_is_verified_once_and_sealed_again(
    kept: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, directory = kept
    (entry,) = entries(directory)
    os.utime(entry)
    assert load(model, directory).is_from_cache

    def fail(*_arguments: object) -> None:
        raise AssertionError("hashed again")

    monkeypatch.setattr(packed_file, "_check_blocks", fail)
    assert load(model, directory).is_from_cache


def test_weights_of_any_size_land_where_the_header_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments that span several pieces of the write, end on their edges, or share one."""
    monkeypatch.setattr(packed_file, "WRITE_BYTES", 8192)
    random = np.random.default_rng(5)
    sizes = [1, 64, 4096, 4097, 8192, 12288, 20000, 65536, 100]
    weights = {
        f"w{i}": [PackedSegment("w8", 16, random.integers(0, 256, n, np.uint8))]
        for i, n in enumerate(sizes)
    }
    path = tmp_path / "x.packed"
    packed_file.write_packed(path, weights, model="m", layout="l")
    os.utime(path)  # so that the checksum of all blocks is checked too
    file = packed_file.open_packed(path, "m", "l")
    assert file is not None
    assert len(file) == len(sizes)
    for name, (segment,) in weights.items():
        found = file.find(name)
        assert found is not None
        np.testing.assert_array_equal(found[0].blocks, segment.blocks)
        assert found[0].blocks.ctypes.data % packed_file.PAGE == 0
        assert not found[0].blocks.flags.writeable
    assert file.find("unheard-of") is None
    assert packed_file.open_packed(path, "m", "other") is None


def test_full_disk_is_a_warning_and_leaves_nothing_behind(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_arguments: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_file, "_write_blocks", fail)
    assert not start(model, tmp_path / "packed").is_from_cache
    assert "No space left on device" in caplog.text
    assert [p.name for p in (tmp_path / "packed").iterdir()] == [".lock"]


def test_nothing_is_written_to_a_nearly_full_disk(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = CacheLimits(min_weights_bytes=0, min_free_bytes=1 << 60)
    start(model, tmp_path / "packed", limits)
    assert "MiB free" in caplog.text
    assert entries(tmp_path / "packed") == []


def test_unusable_directory_is_a_warning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(model, Path("/proc/none"))
    assert "packed weights could not be kept" in caplog.text
    (tmp_path / "file").write_text("")
    with GGUFFile.open(model) as gguf:
        cache = PackedCache(tmp_path / "file" / "below", LIMITS)
        assert cache.open(gguf, CpuBackend(1, "ref")) is None
    assert "packed weights cannot be kept" in caplog.text


def test_small_models_are_not_worth_a_file(model: Path, tmp_path: Path) -> None:
    with GGUFFile.open(model) as gguf:
        assert PackedCache(tmp_path / "packed").open(gguf, CpuBackend(1, "ref")) is None
    assert not (tmp_path / "packed").exists()


def test_a_second_writer_leaves_the_first_alone(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "packed"
    directory.mkdir()
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        start(model, directory)
    assert entries(directory) == []
    assert "packed weights" not in caplog.text


def test_what_a_killed_writer_left_is_removed(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "packed"
    directory.mkdir()
    (directory / ".partial-1").write_bytes(b"half")
    start(model, directory)
    assert len(entries(directory)) == 1
    assert not (directory / ".partial-1").exists()


def test_processes_that_start_at_once_agree(model: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path;"
        "from tests.weights.test_packed_cache import start;"
        "print(sum(float(v.sum()) for v in start(Path(sys.argv[1]), Path(sys.argv[2])).values))"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(model), str(tmp_path / "packed")],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
        )
        for _ in range(3)
    ]
    outputs = {process.communicate(timeout=60)[0] for process in running}
    assert len(outputs) == 1
    assert all(process.returncode == 0 for process in running)
    assert load(model, tmp_path / "packed").is_from_cache


def age(directory: Path) -> None:
    """Make every entry look used long ago, in the order of their names."""
    for index, entry in enumerate(entries(directory)):
        os.utime(entry, ns=(index + 1, entry.stat().st_mtime_ns))


def test_total_size_is_bounded_by_removing_what_was_used_longest_ago(tmp_path: Path) -> None:
    directory = tmp_path / "packed"
    models = [make_tiny_model(tmp_path / f"m{i}.gguf", seed=i) for i in range(4)]
    for model in models[:3]:
        start(model, directory)
    age(directory)
    load(models[0], directory)  # used again, so m1 is the oldest now
    size = entries(directory)[0].stat().st_size
    limits = CacheLimits(max_total_bytes=2 * size + 100, min_weights_bytes=0, min_free_bytes=0)
    start(models[3], directory, limits)
    assert [entry.name[:2] for entry in entries(directory)] == ["m0", "m2", "m3"]


def test_entries_of_one_model_for_other_kernels_are_bounded(
    kept: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, directory = kept
    for build in ("a", "b", "c"):
        monkeypatch.setattr(CpuBackend, "packed_layout", lambda _self, build=build: build)
        start(model, directory)
    assert len(entries(directory)) == LIMITS.max_entries_per_model


def test_missing_weights_of_a_newer_program_are_packed_and_added(
    kept: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program may stack matrices in another way than the one that wrote the entry."""
    model, directory = kept
    key = packed_cache._key
    monkeypatch.setattr(packed_cache, "_key", lambda names: key(names).replace("ffn", "FFN"))
    loaded = start(model, directory)
    assert not loaded.is_from_cache
    again = load(model, directory)
    assert again.is_from_cache
    assert_same(loaded, again)
