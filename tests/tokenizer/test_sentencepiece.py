"""SentencePiece-style vocabularies: merges by score, byte fallback, and the spaces it adds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from caudal.tokenizer import Tokenizer
from caudal.tokenizer.text_encoders import ScoreEncoder, SentencePieceEncoder
from tests.tiny_vocabulary import spm_metadata
from tests.tokenizer.naive import merge_by_score, random_text

FIRST_BYTE = 3


def build(**changes: Any) -> Tokenizer:
    pairs = spm_metadata() | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return Tokenizer.from_gguf_metadata(pairs)


def tiny(pieces: dict[str, float], **changes: Any) -> Tokenizer:
    """Unknown, BOS, EOS, 256 bytes and the given pieces with their scores."""
    base = spm_metadata(1)
    tokens = base["tokenizer.ggml.tokens"][: FIRST_BYTE + 256]
    types = base["tokenizer.ggml.token_type"][: FIRST_BYTE + 256]
    scores = [*np.zeros(len(tokens)), *pieces.values()]
    return build(
        tokens=[*tokens, *pieces],
        token_type=[*types, *[1] * len(pieces)],
        scores=np.array(scores, np.float32),
        **changes,
    )


def expected_ids(metadata: dict[str, Any], text: str) -> list[int]:
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = {
        token: float(score)
        for token, score, kind in zip(tokens, metadata["tokenizer.ggml.scores"], types, strict=True)
        if kind == 1
    }
    ids: list[int] = []
    for piece in merge_by_score("\u2581" + text.replace(" ", "\u2581"), scores):
        if piece in scores:
            ids.append(tokens.index(piece))
        else:
            ids += [FIRST_BYTE + value for value in piece.encode()]
    return ids


def test_ids_equal_the_definition_on_tricky_text() -> None:
    metadata = spm_metadata()
    tokenizer = build(add_bos_token=False)
    assert not isinstance(_inner(tokenizer), ScoreEncoder)
    rng = random.Random(3)
    for _ in range(300):
        text = random_text(rng)
        if text:
            assert tokenizer.encode(text) == expected_ids(metadata, text), repr(text)


@pytest.mark.parametrize("seed", range(20))
def test_ids_equal_the_definition_on_runs_and_overlaps_for_random_vocabularies(seed: int) -> None:
    rng = random.Random(seed)
    pieces = {"a": 0.0, "b": 0.0, "\u2581": 0.0}
    while len(pieces) < 16:
        pieces[rng.choice([*pieces]) + rng.choice([*pieces])] = 0.0
    order = rng.sample(range(len(pieces)), len(pieces))
    for rank, piece in zip(order, pieces, strict=True):
        # Even seeds have ties, which fixed merge ranks could not serve.
        pieces[piece] = -float(rank // 3 if seed % 2 == 0 else rank)
    tokenizer = tiny(pieces, add_bos_token=False)
    assert isinstance(_inner(tokenizer), ScoreEncoder) == (seed % 2 == 0)
    tokens = [tokenizer.token_text(index) for index in range(tokenizer.vocab_size)]
    for _ in range(100):
        text = "".join(rng.choice("aab ") for _ in range(rng.randint(1, 24)))
        merged = merge_by_score("\u2581" + text.replace(" ", "\u2581"), pieces)
        assert [tokens[index] for index in tokenizer.encode(text)] == [
            piece.replace("\u2581", " ") for piece in merged
        ]


def _inner(tokenizer: Tokenizer) -> object:
    assert isinstance(tokenizer._encoder, SentencePieceEncoder)
    return tokenizer._encoder._inner


def test_pieces_whose_letters_are_no_pieces_are_still_found() -> None:
    tokenizer = tiny({"xy": -1.0, "\u2581": -2.0}, add_bos_token=False)
    assert [tokenizer.token_text(i) for i in tokenizer.encode("xyx")] == [" ", "xy", "x"]


def test_control_and_byte_tokens_never_come_out_of_plain_text() -> None:
    """`</` and `s>` would join to `</s>` if control tokens took part in merging."""
    pieces = {"</": -1.0, "s>": -2.0, "<": -3.0, "/": -4.0, "s": -5.0, ">": -6.0}
    pieces |= {"<0x0": -7.0, "A>": -8.0, "0": -9.0, "x": -10.0, "A": -11.0, "<0": -12.0}
    pieces |= {"x0": -13.0, "<0x": -14.0, "\u2581": -15.0}
    tokenizer = tiny(pieces, add_bos_token=False)
    assert 2 not in tokenizer.encode("</s>")
    assert FIRST_BYTE + 10 not in tokenizer.encode("<0x0A>")
    assert tokenizer.decode(tokenizer.encode("</s><0x0A>")) == "</s><0x0A>"
    assert 2 in tokenizer.encode("</s>", parse_special=True)


def test_text_outside_the_pieces_falls_back_to_bytes() -> None:
    tokenizer = build(add_bos_token=False, add_space_prefix=False)
    assert tokenizer.encode("é") == [FIRST_BYTE + 0xC3, FIRST_BYTE + 0xA9]
    assert tokenizer.encode("\n") == [FIRST_BYTE + 10]
    assert tokenizer.token_bytes(FIRST_BYTE + 0xC3) == b"\xc3"


def test_missing_byte_tokens_are_warned_about_and_give_the_unknown_token() -> None:
    metadata = spm_metadata()
    types = metadata["tokenizer.ggml.token_type"]
    types[FIRST_BYTE + 0xC3] = 5
    tokenizer = build(token_type=types, add_bos_token=False, add_space_prefix=False)
    assert any("lacks 1 of the 256 byte tokens" in warning for warning in tokenizer.warnings)
    assert tokenizer.encode("é") == [0]


def test_space_prefix_is_added_at_the_start_and_after_special_tokens() -> None:
    tokenizer = build(add_bos_token=False)
    marked = tokenizer.encode("the</s>the", parse_special=True)
    assert marked == [*tokenizer.encode("the"), 2, *tokenizer.encode("the")]
    assert tokenizer.token_text(marked[0]).startswith(" ")
    bare = build(add_bos_token=False, add_space_prefix=False)
    assert not bare.token_text(bare.encode("the")[0]).startswith(" ")


@pytest.mark.parametrize("text", ["the river", " the", "  two", "", " ", "\nx", "é 😊", "a  b "])
def test_decoding_gives_back_text_with_its_own_leading_spaces(text: str) -> None:
    for tokenizer in (build(), build(add_space_prefix=False)):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_default_special_ids_apply_only_where_the_tokens_are_special() -> None:
    metadata = spm_metadata()
    for name in ("bos_token_id", "eos_token_id", "unknown_token_id"):
        del metadata[f"tokenizer.ggml.{name}"]
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert 2 in tokenizer.eog_ids
