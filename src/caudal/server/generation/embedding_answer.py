"""Answers that hold embeddings."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import msgspec
import numpy as np

from caudal.server.protocol.embeddings import EmbeddingUsage

_encode = msgspec.json.encode


def unit_vector(pooled: bytes, dimensions: int | None) -> bytes:
    """The first `dimensions` values of `pooled` (all for None), scaled to length 1.

    Both are little-endian float32. A vector of zeros stays one.
    """
    values = np.frombuffer(pooled, "<f4")[:dimensions].astype(np.float64)
    length = float(np.sqrt(np.sum(values * values)))
    return (values / (length or 1.0)).astype("<f4").tobytes()


def encode_embeddings(
    pooled: Sequence[bytes], first_index: int, *, dimensions: int | None, is_base64: bool
) -> bytes:
    """Some of the entries of an answer, as JSON."""
    return b",".join(
        _embedding(index, unit_vector(values, dimensions), is_base64)
        for index, values in enumerate(pooled, first_index)
    )


def encode_vectors(pooled: Sequence[bytes], first_index: int, *, dimensions: int | None) -> bytes:
    """Some of the vectors of an answer as JSON lists; `first_index` does not matter to them."""
    return b",".join(
        _encode(np.frombuffer(unit_vector(values, dimensions), "<f4").tolist()) for values in pooled
    )


def embedding_response(parts: Sequence[bytes], *, model: str, num_tokens: int) -> bytes:
    """The body; `parts` are all entries in order, from `encode_embeddings`."""
    usage = _encode(EmbeddingUsage(num_tokens, num_tokens))
    tail = b'],"model":' + _encode(model) + b',"usage":' + usage + b"}"
    return b'{"object":"list","data":[' + b",".join(parts) + tail


def _embedding(index: int, vector: bytes, is_base64: bool) -> bytes:
    if is_base64:
        value = b'"' + base64.b64encode(vector) + b'"'
    else:
        value = _encode(np.frombuffer(vector, "<f4").tolist())
    return b'{"object":"embedding","index":%d,"embedding":%b}' % (index, value)
