"""Models from the hub, with a stand-in for huggingface-hub's two functions."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from caudal.errors import ModelDownloadError, ModelNotFoundError, UnsupportedModelError
from caudal.weights.download import resolve_model
from caudal.weights.hub_models import HubId, parse_hub_id, pull_hub_model
from caudal.weights.progress import SilentProgress

REPO = "owner/Tiny-GGUF"
SILENT = SilentProgress()


class RecordingProgress(SilentProgress):
    """Remembers what was begun and how far it got."""

    def __init__(self) -> None:
        self.transfers: list[list[Any]] = []

    def begin(self, label: str, total_bytes: int | None, done_bytes: int = 0) -> None:
        self.transfers.append([label, total_bytes, done_bytes])

    def advance(self, num_bytes: int) -> None:
        self.transfers[-1][2] += num_bytes


class Hub:
    """A repository: file names and contents. Counts what is asked of it."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.listings = 0
        self.downloads: list[str] = []
        self.failure: Exception | None = None
        self.corrupt = False

    def model_info(self, repo: str, *, files_metadata: bool) -> SimpleNamespace:
        assert files_metadata
        self.listings += 1
        self.fail_if_asked()
        assert repo == REPO
        siblings = [
            SimpleNamespace(
                rfilename=name,
                size=len(content),
                lfs=SimpleNamespace(sha256=hashlib.sha256(content).hexdigest()),
            )
            for name, content in self.files.items()
        ]
        return SimpleNamespace(siblings=siblings)

    def download(self, repo: str, name: str, *, local_dir: Path, tqdm_class: type[Any]) -> str:
        assert repo == REPO
        self.downloads.append(name)
        self.fail_if_asked()
        content = self.files[name]
        path = Path(local_dir) / name
        assert not path.exists(), "the hub's client would keep a file that is already there"
        path.parent.mkdir(parents=True, exist_ok=True)
        half = len(content) // 2
        with tqdm_class(total=len(content), initial=half, desc=name, unit="B") as bar:
            bar.update(len(content) - half)
        path.write_bytes(b"x" + content[1:] if self.corrupt else content)
        return str(path)

    def fail_if_asked(self) -> None:
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    names = [
        "README.md",
        "tiny.F16.gguf",
        "tiny-Q4_K_M.gguf",
        "tiny-Q8_0.gguf",
        "tiny-IQ2_XS.gguf",
        "variant/tiny-abliterated-Q4_K_M.gguf",
        "big/tiny-Q6_K-00002-of-00002.gguf",
        "big/tiny-Q6_K-00001-of-00002.gguf",
        "mmproj-tiny-Q4_0.gguf",
        "../outside-Q4_1.gguf",
    ]
    stand_in = Hub({name: f"content of {name}".encode() * 20 for name in names})
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: stand_in)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", stand_in.download)
    yield stand_in
    outside = [name for name in stand_in.downloads if ".." in name]
    assert not outside


def _hub_id(text: str) -> HubId:
    parsed = parse_hub_id(text)
    assert parsed is not None
    return parsed


def _pull(text: str, root: Path, **options: Any) -> Path:
    return pull_hub_model(_hub_id(text), root, options.pop("progress", SILENT), **options)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("owner/repo", HubId("owner/repo")),
        ("Owner-1/Repo.v2_x", HubId("Owner-1/Repo.v2_x")),
        ("owner/repo:Q4_K_M", HubId("owner/repo", quant="Q4_K_M")),
        ("owner/repo/file.gguf", HubId("owner/repo", file="file.gguf")),
        ("owner/repo/folder/file.gguf", HubId("owner/repo", file="folder/file.gguf")),
        ("repo", None),
        ("owner/file.gguf", None),
        ("owner/repo/../../x.gguf", None),
        ("owner/..", None),
        ("./owner/repo", None),
        ("owner/repo/", None),
        ("owner/repo/folder", None),
        ("owner/repo:", None),
        ("owner/repo:a b", None),
        ("owner/repo\n", None),
        ("öwner/repo", None),
    ],
)
def test_hub_ids(text: str, expected: HubId | None) -> None:
    assert parse_hub_id(text) == expected


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (REPO, "tiny-Q4_K_M.gguf"),
        (f"{REPO}:q8_0", "tiny-Q8_0.gguf"),
        (f"{REPO}:F16", "tiny.F16.gguf"),
        (f"{REPO}/tiny.F16.gguf", "tiny.F16.gguf"),
        (f"{REPO}/variant/tiny-abliterated-Q4_K_M.gguf", "variant/tiny-abliterated-Q4_K_M.gguf"),
    ],
)
def test_selection_picks_one_file(hub: Hub, tmp_path: Path, text: str, name: str) -> None:
    path = _pull(text, tmp_path)
    assert path == tmp_path / "hub" / "owner--Tiny-GGUF" / name
    assert path.read_bytes() == hub.files[name]
    assert hub.downloads == [name]


def test_split_model_is_fetched_whole(hub: Hub, tmp_path: Path) -> None:
    for text in (f"{REPO}:Q6_K", f"{REPO}/big/tiny-Q6_K-00002-of-00002.gguf"):
        path = _pull(text, tmp_path)
        assert path.name == "tiny-Q6_K-00001-of-00002.gguf"
        assert len(list(path.parent.glob("*.gguf"))) == 2
    assert len(hub.downloads) == 2


def test_pulled_model_needs_no_network(hub: Hub, tmp_path: Path) -> None:
    path = _pull(REPO, tmp_path)
    hub.failure = ConnectionError("no network")
    assert _pull(REPO, tmp_path) == path
    assert _pull(REPO, tmp_path, verify=True) == path
    assert hub.listings == 1


def test_changed_file_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    path = _pull(REPO, tmp_path)
    path.write_bytes(b"short")
    assert _pull(REPO, tmp_path).read_bytes() == hub.files["tiny-Q4_K_M.gguf"]
    before = path.stat()
    path.write_bytes(b"x" + path.read_bytes()[1:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    repaired = _pull(REPO, tmp_path, verify=True)
    assert repaired.read_bytes() == hub.files["tiny-Q4_K_M.gguf"]
    assert len(hub.downloads) == 3


def test_wrong_checksum_is_refused_and_removed(hub: Hub, tmp_path: Path) -> None:
    hub.corrupt = True
    with pytest.raises(ModelDownloadError, match=r"tiny-Q4_K_M\.gguf: SHA-256 is"):
        _pull(REPO, tmp_path)
    assert not list(tmp_path.rglob("*.gguf"))
    hub.corrupt = False
    assert _pull(REPO, tmp_path).exists()


def test_resumed_download_starts_where_it_stopped(hub: Hub, tmp_path: Path) -> None:
    progress = RecordingProgress()
    _pull(REPO, tmp_path, progress=progress)
    size = len(hub.files["tiny-Q4_K_M.gguf"])
    assert progress.transfers == [
        ["pulling tiny-Q4_K_M.gguf", size, size],
        ["checking tiny-Q4_K_M.gguf", size, size],
    ]


@pytest.mark.parametrize("text", [f"{REPO}:IQ2_XS", f"{REPO}:q3_k_m", f"{REPO}:Q2_K"])
def test_unsupported_quantisation_is_refused_before_any_download(
    hub: Hub, tmp_path: Path, text: str
) -> None:
    with pytest.raises(UnsupportedModelError, match="models are not supported"):
        _pull(text, tmp_path)
    assert hub.listings == 0


@pytest.mark.parametrize("text", [f"{REPO}:Q5_K_M", f"{REPO}/none.gguf"])
def test_missing_selection_offers_what_there_is(hub: Hub, tmp_path: Path, text: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"it has .*tiny-Q4_K_M\.gguf, .*tiny\.F16"):
        _pull(text, tmp_path)


def test_repository_without_gguf_files(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"model.safetensors": b"x"}
    with pytest.raises(ModelNotFoundError, match="it has no GGUF files"):
        _pull(REPO, tmp_path)


def test_only_file_is_taken_whatever_its_name(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"model.gguf": b"x"}
    assert _pull(REPO, tmp_path).name == "model.gguf"


def _hub_error(kind: type[Any]) -> Exception:
    request = httpx.Request("GET", "http://hub.invalid")
    error: Exception = kind("first line\nsecond", response=httpx.Response(404, request=request))
    return error


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        (_hub_error(errors.RepositoryNotFoundError), ModelNotFoundError, "no such .*: first line$"),
        (_hub_error(errors.GatedRepoError), ModelDownloadError, "is gated: .*HF_TOKEN"),
        (_hub_error(errors.HfHubHTTPError), ModelDownloadError, "cannot fetch .*: first line$"),
        (errors.LocalEntryNotFoundError("offline"), ModelDownloadError, "cannot be reached"),
        (errors.HFValidationError("bad id"), ModelNotFoundError, "bad id"),
        (ConnectionError("refused"), ModelDownloadError, "refused"),
        (httpx.ConnectError("unreachable"), ModelDownloadError, "unreachable"),
        (TimeoutError(), ModelDownloadError, "TimeoutError"),
    ],
)
def test_hub_errors_are_typed(
    hub: Hub, tmp_path: Path, failure: Exception, kind: type[Exception], message: str
) -> None:
    hub.failure = failure
    with pytest.raises(kind, match=message):
        _pull(REPO, tmp_path)


def test_resolve_pulls_hub_ids_into_the_cache(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAUDAL_CACHE_DIR", str(tmp_path))
    path = resolve_model(f"{REPO}:Q8_0", progress=False)
    assert path == tmp_path / "models" / "hub" / "owner--Tiny-GGUF" / "tiny-Q8_0.gguf"
    assert hub.downloads == ["tiny-Q8_0.gguf"]


def test_missing_client_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(ModelDownloadError, match="pip install huggingface-hub"):
        _pull(REPO, tmp_path)
