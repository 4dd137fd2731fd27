"""The served model from its file: tokenizer, chat template and what `/v1/models` shows."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from caudal.sampling_params import Pooling
from caudal.server.model import ServedModel
from caudal.tokenizer.chat_template import ChatTemplate
from caudal.tokenizer.gguf_tokenizer import Tokenizer
from caudal.weights.gguf import GGUFFile


def load_served_model(path: Path, name: str) -> ServedModel:
    """Read everything but the weights.

    A missing or broken chat template does not keep a model from being served. Raises
    ModelFileError or UnsupportedModelError for a file without a usable tokenizer.
    """
    with GGUFFile.open(path) as gguf:
        tokenizer = Tokenizer.from_gguf_metadata(gguf.metadata)
        return ServedModel(
            name=name,
            tokenizer=tokenizer,
            chat_template=ChatTemplate.from_gguf_metadata(gguf.metadata, tokenizer),
            architecture=gguf.architecture,
            quantization=_quantization(gguf),
            pooling=_pooling(gguf),
            num_parameters=sum(math.prod(tensor.shape) for tensor in gguf.tensors.values()),
            num_bytes=sum(tensor.nbytes for tensor in gguf.tensors.values()),
            facts=_facts(gguf),
        )


def _quantization(gguf: GGUFFile) -> str:
    """The type that holds most of the weights."""
    sizes: Counter[str] = Counter()
    for tensor in gguf.tensors.values():
        sizes[tensor.ggml_type.name] += tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else ""


_LAST_TOKEN = 3
"""`<architecture>.pooling_type` in a GGUF file: 1 is the mean, 3 the last token."""


def _pooling(gguf: GGUFFile) -> Pooling:
    kind = gguf.metadata.get(f"{gguf.architecture}.pooling_type")
    return "last" if kind == _LAST_TOKEN else "mean"


def _facts(gguf: GGUFFile) -> dict[str, str | int | float | bool]:
    facts: dict[str, str | int | float | bool] = {}
    for key in gguf.metadata:
        if gguf.metadata.array_length(key) is None and key != "tokenizer.chat_template":
            value = gguf.metadata[key]
            assert isinstance(value, str | int | float)
            facts[key] = value
    return facts
