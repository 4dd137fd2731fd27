"""Models on the Hugging Face hub, fetched through huggingface-hub when an id asks for one."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from caudal.errors import ModelDownloadError, ModelNotFoundError, UnsupportedModelError
from caudal.weights.model_store import (
    discard,
    hash_file,
    is_intact,
    locked,
    read_json,
    read_note,
    write_json,
    write_note,
)
from caudal.weights.progress import Progress

_HUB_ID = re.compile(
    r"^(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?::(?P<quant>\w+)|/(?P<file>[^:]+\.gguf))?$",
    re.ASCII,
)
_QUANT = re.compile(
    r"(?:^|[-._/])((?:I?Q\d|TQ\d|MXFP4|NVFP4|BF16|F16|F32)(?:_[A-Z0-9]+)*)(?=[-./]|$)", re.I
)
_SPLIT_SUFFIX = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")

PREFERRED_QUANTS = ("Q4_K_M", "Q4_1", "Q4_0", "Q4_K_S", "Q8_0", "Q5_K_M", "Q6_K", "F16", "BF16")
"""Order in which a quantisation is picked when the id names none: fastest good ones first."""

_UNSUPPORTED_QUANT = re.compile(r"^(IQ\d|TQ\d|Q[1238]_[K1]|Q1_0|MXFP4|NVFP4)", re.I)

_SELECTIONS = "selections.json"


@dataclass(frozen=True, slots=True)
class HubId:
    """`owner/repo`, `owner/repo:QUANT` or `owner/repo/file.gguf`."""

    repo: str
    quant: str | None = None
    file: str | None = None

    @property
    def selection(self) -> str:
        """What it selects in the repository, as a key."""
        return self.file or (self.quant or "").upper()


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file that the hub lists."""

    name: str
    size: int | None
    sha256: str | None


def parse_hub_id(text: str) -> HubId | None:
    """`text` as a hub id, None if it does not have that form."""
    match = _HUB_ID.fullmatch(text)
    if match is None or ".." in text or text.endswith("/"):
        return None
    if match["file"] is None and match["quant"] is None and text.endswith(".gguf"):
        return None
    return HubId(match["repo"], match["quant"], match["file"])


def pull_hub_model(hub_id: HubId, root: Path, progress: Progress, *, verify: bool = False) -> Path:
    """The path of the (first) model file that `hub_id` selects, fetched first if it is not there.

    Files that are there and intact need no network. An interrupted download goes on where it
    stopped. Raises ModelNotFoundError if the hub has no such repository, file or quantisation,
    UnsupportedModelError for a quantisation that Caudal does not run, ModelDownloadError if the
    hub cannot be reached or a checksum is wrong.
    """
    if hub_id.quant is not None and _UNSUPPORTED_QUANT.match(hub_id.quant):
        raise UnsupportedModelError(f"{hub_id.repo}: {hub_id.quant} models are not supported")
    directory = root / "hub" / hub_id.repo.replace("/", "--")
    known = _selected(directory, hub_id)
    if known and not verify and all(is_intact(path) for path in known):
        return known[0]
    with locked(directory, progress):
        known = _selected(directory, hub_id)
        if known and all(_is_sound(path, verify, progress) for path in known):
            return known[0]
        files = _choose(hub_id, _list_files(hub_id.repo))
        paths = [_fetch(hub_id.repo, file, directory, progress) for file in files]
        selections = read_json(directory / _SELECTIONS)
        selections[hub_id.selection] = [file.name for file in files]
        write_json(directory / _SELECTIONS, selections)
    return paths[0]


def _selected(directory: Path, hub_id: HubId) -> list[Path]:
    names = read_json(directory / _SELECTIONS).get(hub_id.selection)
    if not isinstance(names, list):
        return []
    return [directory / str(name) for name in names]


def _is_sound(path: Path, verify: bool, progress: Progress) -> bool:
    if not is_intact(path):
        return False
    note = read_note(path)
    if verify and (note is None or hash_file(path, progress) != note.sha256):
        progress.note(f"{path} is damaged; fetching it again")
        discard(path)
        return False
    return True


def _list_files(repo: str) -> list[HubFile]:
    hub = _import_hub()
    with _typed_errors(repo):
        siblings = hub.HfApi().model_info(repo, files_metadata=True).siblings or []
    files = []
    for sibling in siblings:
        name = sibling.rfilename
        if not name.endswith(".gguf") or ".." in Path(name).parts or Path(name).is_absolute():
            continue
        lfs = getattr(sibling, "lfs", None)
        sha256 = getattr(lfs, "sha256", None)
        files.append(HubFile(name, getattr(sibling, "size", None), sha256))
    return sorted(files, key=lambda file: file.name)


def _choose(hub_id: HubId, files: list[HubFile]) -> list[HubFile]:
    """The parts of the model that `hub_id` selects, in order."""
    models: dict[str, list[HubFile]] = {}
    for file in files:
        if "mmproj" not in file.name and "imatrix" not in file.name:
            models.setdefault(_SPLIT_SUFFIX.sub("", file.name), []).append(file)
    if hub_id.file is not None:
        for parts in models.values():
            if any(part.name == hub_id.file for part in parts):
                return parts
        raise ModelNotFoundError(f"{hub_id.repo} has no file {hub_id.file}: {_offer(models)}")
    by_quant: dict[str, list[HubFile]] = {}
    # Shorter names first: a model in the root wins over a variant in a folder.
    for name in sorted(models, key=lambda name: (len(name), name)):
        by_quant.setdefault(_quant_of(name), models[name])
    if hub_id.quant is not None:
        if hub_id.quant.upper() in by_quant:
            return by_quant[hub_id.quant.upper()]
        raise ModelNotFoundError(f"{hub_id.repo} has no {hub_id.quant} model: {_offer(models)}")
    for quant in PREFERRED_QUANTS:
        if quant in by_quant:
            return by_quant[quant]
    if len(models) == 1:
        return next(iter(models.values()))
    raise ModelNotFoundError(f"{hub_id.repo}: name one of its files: {_offer(models)}")


def _quant_of(name: str) -> str:
    found = _QUANT.findall(name.removesuffix(".gguf"))
    return str(found[-1]).upper() if found else ""


def _offer(models: dict[str, list[HubFile]]) -> str:
    if not models:
        return "it has no GGUF files"
    return "it has " + ", ".join(parts[0].name for parts in models.values())


def _fetch(repo: str, file: HubFile, directory: Path, progress: Progress) -> Path:
    path = directory / file.name
    if is_intact(path, file.sha256):
        return path
    # Without its note the file is not trusted; huggingface-hub would take it as it is.
    discard(path)
    hub = _import_hub()
    # Older clients only know their own bar.
    has_bar_class = "tqdm_class" in inspect.signature(hub.hf_hub_download).parameters
    bar = {"tqdm_class": _bar_class(file, progress)} if has_bar_class else {}
    try:
        with _typed_errors(repo):
            hub.hf_hub_download(repo, file.name, local_dir=directory, **bar)
    finally:
        progress.end()
    sha256 = hash_file(path, progress)
    if file.sha256 is not None and sha256 != file.sha256:
        discard(path)
        raise ModelDownloadError(f"{file.name}: SHA-256 is {sha256}, expected {file.sha256}")
    write_note(path, sha256)
    return path


def _bar_class(file: HubFile, progress: Progress) -> type[Any]:
    """A tqdm that shows nothing itself and passes everything on to `progress`."""
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    class ForwardingBar(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            total, initial = kwargs.get("total", file.size), kwargs.get("initial", 0)
            super().__init__(*args, **{**kwargs, "disable": True})
            progress.begin(f"pulling {file.name}", total, initial)

        def update(self, n: float | None = 1) -> bool | None:
            progress.advance(int(n or 0))
            return None

    return ForwardingBar


def _import_hub() -> ModuleType:
    try:
        import huggingface_hub
    except ImportError:
        raise ModelDownloadError(
            "models from the hub need the package huggingface-hub: pip install huggingface-hub"
        ) from None
    return huggingface_hub


@contextlib.contextmanager
def _typed_errors(repo: str) -> Iterator[None]:
    """Turn the hub client's errors into ours."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise ModelDownloadError(
            f"{repo} is gated: accept its terms on the hub and set HF_TOKEN"
        ) from None
    except (
        errors.RepositoryNotFoundError,
        errors.EntryNotFoundError,
        errors.HFValidationError,
    ) as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise ModelDownloadError(f"{repo}: the hub cannot be reached: {error}") from None
        raise ModelNotFoundError(
            f"{repo}: no such repository or file on the hub: {_first_line(error)}"
        ) from None
    except Exception as error:
        # The client lets errors of its HTTP library through, which differ between versions.
        raise ModelDownloadError(
            f"{repo}: cannot fetch from the hub: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
