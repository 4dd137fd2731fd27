"""Tokenizer metadata that contradicts itself must be refused by name, never be guessed around."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from caudal.errors import ModelFileError, UnsupportedModelError
from caudal.tokenizer import Tokenizer
from tests.tiny_vocabulary import bpe_metadata, spm_metadata


def build(metadata: dict[str, Any], **changes: Any) -> Tokenizer:
    pairs = metadata | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return Tokenizer.from_gguf_metadata({k: v for k, v in pairs.items() if v is not None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": []}, "tokens is missing or empty"),
        ({"tokens": np.zeros(3, np.uint8)}, "tokens must be an array of strings"),
        ({"tokens": ["a", 1]}, "tokens must be an array of strings, not a value of type list"),
        ({"tokens": ["a", "b\udc80"]}, "tokens: id 1 is not valid Unicode text"),
        ({"tokens": "abc"}, "tokens must be an array of strings"),
        ({"token_type": np.ones(5, np.int32)}, "token_type has 5 entries"),
        ({"token_type": np.ones(359, np.float32)}, "token_type must be an array of int32"),
        ({"token_type": np.full(359, 9, np.int32)}, "token_type: value 9"),
        ({"token_type": 7}, "token_type must be an array of int32"),
        ({"scores": np.zeros(359, np.uint8)}, "scores must be an array of float32, not .*uint8"),
        ({"scores": np.zeros(359, np.int8)}, "scores must be an array of float32"),
        ({"scores": np.zeros(7, np.float32)}, "scores has 7 entries, but .*tokens has 359"),
        ({"scores": np.full(359, np.nan, np.float32)}, "scores: id 0 is not a number"),
        ({"merges": None}, "merges is missing"),
        ({"merges": 3}, "merges must be an array of strings"),
        ({"merges": ["a b c"]}, "merges: entry 0 'a b c' is not two tokens"),
        ({"merges": ["ab"]}, "merges: entry 0 'ab' is not two tokens"),
        ({"merges": ["a zebra"]}, "merges: entry 0 uses 'zebra', which is no token"),
        ({"bos_token_id": 359}, "bos_token_id is 359, but the vocabulary has 359 tokens"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eos_token_id": True}, "eos_token_id must be an integer"),
        ({"eot_token_id": 2**63}, "eot_token_id is 9223372036854775808"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id is missing"),
        ({"add_bos_token": 1}, "add_bos_token must be a boolean"),
        ({"pre": 5}, "pre must be a string"),
        ({"model": ["gpt2"]}, "model must be a string"),
    ],
)
def test_contradictory_metadata_is_refused_naming_the_key(
    changes: dict[str, Any], message: str
) -> None:
    """B99."""
    metadata = bpe_metadata("smollm")
    assert len(metadata["tokenizer.ggml.tokens"]) == 359
    with pytest.raises(ModelFileError, match=f"tokenizer.ggml.{message}"):
        build(metadata, **changes)


def test_repeated_token_is_refused_naming_both_ids() -> None:
    metadata = bpe_metadata("smollm")
    metadata["tokenizer.ggml.tokens"][300] = metadata["tokenizer.ggml.tokens"][100]
    with pytest.raises(ModelFileError, match="tokens: ids 100 and 300 are both"):
        build(metadata)


@pytest.mark.parametrize("model", ["bert", "t5", "", "gpt2 "])
def test_other_kinds_of_vocabulary_are_refused_listing_the_known(model: str) -> None:
    with pytest.raises(UnsupportedModelError, match="not supported; known: gpt2, llama"):
        build(bpe_metadata("smollm"), model=model)


def test_sentencepiece_vocabulary_without_scores_is_refused() -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.scores is missing"):
        build(spm_metadata(), scores=None)


def test_byte_token_with_another_text_is_refused() -> None:
    metadata = spm_metadata()
    metadata["tokenizer.ggml.tokens"][10] = "<0x+7>"
    with pytest.raises(ModelFileError, match=r"id 10 '<0x\+7>' is typed as a byte"):
        build(metadata)


def test_missing_token_types_still_give_control_tokens_and_a_warning() -> None:
    tokenizer = build(bpe_metadata("smollm"), token_type=None)
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [2]
    assert any("token_type is missing" in warning for warning in tokenizer.warnings)


def test_turn_marker_typed_as_normal_becomes_a_control_token_with_a_warning() -> None:
    metadata = bpe_metadata("smollm")
    metadata["tokenizer.ggml.token_type"][2] = 1
    tokenizer = build(metadata)
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [2]
    assert 2 not in tokenizer.encode("<|im_end|>")
    assert any("token 2 '<|im_end|>'" in warning for warning in tokenizer.warnings)


def test_empty_token_texts_do_not_count_as_duplicates() -> None:
    metadata = bpe_metadata("smollm")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    tokenizer = build(metadata, tokens=[*tokens, "", ""], token_type=[*types, 5, 5])
    assert tokenizer.vocab_size == len(tokens) + 2
    assert tokenizer.decode(tokenizer.encode("hello river")) == "hello river"


def test_all_end_of_turn_tokens_end_a_generation() -> None:
    metadata = bpe_metadata("smollm")
    tokenizer = build(metadata, eos_token_id=0, eot_token_id=5)
    assert tokenizer.eog_ids == {0, 2, 5}
    assert tokenizer.special_ids == {0, 1, 2}


def test_vocabulary_without_some_text_bytes_warns() -> None:
    metadata = bpe_metadata("smollm")
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.token_type"][tokens.index("Q")] = 5
    assert any("lacks 1 of the 256 byte tokens" in w for w in build(metadata).warnings)
    assert build(bpe_metadata("smollm")).warnings == []
