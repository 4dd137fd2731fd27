"""Tokenizer metadata of a GGUF file, checked before anything is built from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from caudal.errors import ModelFileError
from caudal.weights.special_tokens import eog_token_ids

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types of `tokenizer.ggml.token_type` (GGUF specification)."""

_PREFIX = "tokenizer.ggml."
_SPECIAL_NAMES = ("bos", "eos", "eot", "eom", "unknown", "padding", "separator", "mask")
_WELL_KNOWN_CONTROL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|end|>",
    "<start_of_turn>",
    "<end_of_turn>",
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens with their types, scores and special ids; everything in range and consistent."""

    model: str
    pre: str | None
    tokens: list[str]
    ids: dict[str, int]
    """Id of each token text."""
    types: npt.NDArray[np.int32]  # [vocab_size]
    scores: npt.NDArray[np.float64] | None  # [vocab_size]
    merges: list[str] | None
    special: dict[str, int]
    """Named ids that the file sets, by bos, eos, eot, eom, unknown, padding, …"""
    eog_ids: frozenset[int]
    add_bos: bool | None
    add_space_prefix: bool | None
    warnings: list[str]

    def ids_of_type(self, *types: int) -> list[int]:
        """Ids whose type is one of `types`, ascending."""
        return np.flatnonzero(np.isin(self.types, types)).tolist()


def read_vocabulary(metadata: Mapping[str, object]) -> Vocabulary:
    """Check and collect the `tokenizer.ggml.*` keys.

    Raises ModelFileError naming the key if one is missing, has the wrong type or length, repeats
    a token or points outside the vocabulary.
    """
    tokens, ids = _tokens(metadata)
    size = len(tokens)
    warnings: list[str] = []
    special = _special_ids(metadata, size)
    types = _types(metadata, ids, special, warnings)
    return Vocabulary(
        model=_string(metadata, "model") or "",
        pre=_string(metadata, "pre"),
        tokens=tokens,
        ids=ids,
        types=types,
        scores=_scores(metadata, size),
        merges=_strings(metadata, "merges"),
        special=special,
        eog_ids=_eog_ids(metadata, tokens, types),
        add_bos=_flag(metadata, "add_bos_token"),
        add_space_prefix=_flag(metadata, "add_space_prefix"),
        warnings=warnings,
    )


def _tokens(metadata: Mapping[str, object]) -> tuple[list[str], dict[str, int]]:
    tokens = _strings(metadata, "tokens")
    if not tokens:
        raise ModelFileError(f"{_PREFIX}tokens is missing or empty: the file has no vocabulary")
    if "" in tokens:
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        # The dictionary keeps the last id of a text, so the earlier one is where they differ.
        index = next(index for index, token in enumerate(tokens) if ids[token] != index)
        shown = _shown(tokens[index])
        raise ModelFileError(
            f"{_PREFIX}tokens: ids {index} and {ids[tokens[index]]} are both {shown}"
        )
    if not _is_unicode("".join(tokens)):
        index = next(index for index, token in enumerate(tokens) if not _is_unicode(token))
        raise ModelFileError(f"{_PREFIX}tokens: id {index} is not valid Unicode text")
    return tokens, ids


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _types(
    metadata: Mapping[str, object],
    ids: dict[str, int],
    special: dict[str, int],
    warnings: list[str],
) -> npt.NDArray[np.int32]:
    raw = metadata.get(_PREFIX + "token_type")
    if raw is None:
        types = np.full(len(ids), NORMAL, np.int32)
        types[list(special.values())] = CONTROL
        warnings.append(f"{_PREFIX}token_type is missing: only named special tokens are control")
    else:
        given = _numbers(raw, "token_type", kinds="iu", expected="int32", size=len(ids))
        low, high = int(given.min()), int(given.max())
        if low < 0 or high > BYTE:
            raise ModelFileError(f"{_PREFIX}token_type: value {low if low < 0 else high} not 0–6")
        types = given.astype(np.int32)
        types[types == 0] = NORMAL
    # A turn marker that the model can write but no prompt can contain breaks every chat, so the
    # well-known ones are control tokens whatever an old converter said.
    for token in _WELL_KNOWN_CONTROL:
        index = ids.get(token)
        if index is not None and types[index] == NORMAL:
            types[index] = CONTROL
            warnings.append(f"token {index} {token!r} is not marked as control; treated as control")
    return types


def _scores(metadata: Mapping[str, object], size: int) -> npt.NDArray[np.float64] | None:
    raw = metadata.get(_PREFIX + "scores")
    if raw is None:
        return None
    array = _numbers(raw, "scores", kinds="fi", expected="float32", size=size)
    if array.dtype.kind == "i" and array.dtype.itemsize < 4:
        raise _wrong_type("scores", "an array of float32", raw)
    scores = array.astype(np.float64)
    if np.isnan(scores).any():
        raise ModelFileError(
            f"{_PREFIX}scores: id {int(np.isnan(scores).argmax())} is not a number"
        )
    return scores


def _special_ids(metadata: Mapping[str, object], size: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in _SPECIAL_NAMES:
        key = f"{_PREFIX}{name}_token_id"
        value = metadata.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise _wrong_type(f"{name}_token_id", "an integer", value)
        if not 0 <= value < size:
            raise ModelFileError(f"{key} is {value}, but the vocabulary has {size} tokens")
        found[name] = int(value)
    return found


def _eog_ids(
    metadata: Mapping[str, object], tokens: list[str], types: npt.NDArray[np.int32]
) -> frozenset[int]:
    """The ids that the engine stops at, after the corrections made to `types`."""
    keys = (f"{_PREFIX}{name}_token_id" for name in ("eos", "eot", "eom"))
    named: dict[str, object] = {key: metadata[key] for key in keys if key in metadata}
    named |= {_PREFIX + "tokens": tokens, _PREFIX + "token_type": types}
    return eog_token_ids(named)


def _string(metadata: Mapping[str, object], name: str) -> str | None:
    value = metadata.get(_PREFIX + name)
    if value is None or isinstance(value, str):
        return value
    raise _wrong_type(name, "a string", value)


def _flag(metadata: Mapping[str, object], name: str) -> bool | None:
    value = metadata.get(_PREFIX + name)
    if value is None or isinstance(value, bool):
        return value
    raise _wrong_type(name, "a boolean", value)


def _strings(metadata: Mapping[str, object], name: str) -> list[str] | None:
    value = metadata.get(_PREFIX + name)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not set(map(type, value)) <= {str}:
        raise _wrong_type(name, "an array of strings", value)
    return list(value)


def _numbers(
    raw: object, name: str, *, kinds: str, expected: str, size: int
) -> npt.NDArray[np.generic]:
    if isinstance(raw, Sequence) and not isinstance(raw, str | bytes):
        raw = np.asarray(raw)
    if not isinstance(raw, np.ndarray) or raw.ndim != 1 or raw.dtype.kind not in kinds:
        raise _wrong_type(name, f"an array of {expected}", raw)
    if len(raw) != size:
        raise ModelFileError(
            f"{_PREFIX}{name} has {len(raw)} entries, but {_PREFIX}tokens has {size}"
        )
    return raw


def _wrong_type(name: str, expected: str, value: object) -> ModelFileError:
    is_array = isinstance(value, np.ndarray)
    kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    article = "" if is_array else "a value of type "
    return ModelFileError(f"{_PREFIX}{name} must be {expected}, not {article}{kind}")


def _shown(token: str, limit: int = 60) -> str:
    return repr(token if len(token) <= limit else token[:limit] + "…")
