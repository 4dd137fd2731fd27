"""Follows a grammar with random tokens, as a model without any sense would."""

from __future__ import annotations

import random
from functools import cache

import numpy as np

from caudal.sampling_params import StructuredOutputsParams
from caudal.structured_output.constraint import Constraint, ConstraintFactory
from caudal.structured_output.vocabulary import GrammarVocabulary
from tests.tiny_vocabulary import bpe_metadata, spm_metadata

KINDS = ("gpt2", "llama")


@cache
def vocabulary(kind: str) -> GrammarVocabulary:
    """Of one of KINDS; 356 or so tokens, all single bytes among them."""
    return GrammarVocabulary.from_metadata(
        bpe_metadata("smollm") if kind == "gpt2" else spm_metadata()
    )


def compile_form(params: StructuredOutputsParams, kind: str = "gpt2") -> Constraint:
    """A constraint in its first state."""
    factory = ConstraintFactory(lambda: vocabulary(kind))
    try:
        return factory.create(params, [])
    finally:
        factory.shutdown()


def allowed_ids(constraint: Constraint, kind: str = "gpt2") -> list[int]:
    """Tokens that may come next."""
    constraint.fill_mask()
    mask = constraint.take_mask()
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def feed(constraint: Constraint, text: str, kind: str = "gpt2") -> None:
    """Accept `text`, a byte a token."""
    known = vocabulary(kind).token_bytes
    for value in text.encode():
        constraint.accept(known.index(bytes([value])))


def can_follow(constraint: Constraint, text: str, kind: str = "gpt2") -> bool:
    """Whether the first byte of `text` is allowed next."""
    known = vocabulary(kind).token_bytes
    return known.index(text.encode()[:1]) in allowed_ids(constraint, kind)


def random_text(
    params: StructuredOutputsParams, seed: int, *, kind: str = "gpt2", closes: bytes = b'"}],'
) -> str:
    """A complete output; tokens that end something are likelier, so that it does end."""
    constraint = compile_form(params, kind)
    known = vocabulary(kind)
    rng = random.Random(seed)
    raw = b""
    for _ in range(5_000):
        ids = allowed_ids(constraint, kind)
        ends = [index for index in ids if index in known.eog_ids or known.token_bytes[index] in
                [bytes([each]) for each in closes]]  # fmt: skip
        token_id = rng.choice(ends if ends and rng.random() < 0.4 else ids)
        constraint.accept(token_id)
        if constraint.is_complete:
            return raw.decode()
        raw += known.token_bytes[token_id]
    raise AssertionError(f"no end after {raw[:500]!r}")
