"""Encoding and decoding through the public interface, special tokens included."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from caudal.errors import InvalidRequestError
from caudal.tokenizer import Tokenizer
from caudal.tokenizer.special_tokens import SpecialTokenFinder
from caudal.weights.gguf import GGUFFile
from tests.tiny_vocabulary import bpe_metadata
from tests.tokenizer.naive import random_text


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf_metadata(bpe_metadata("smollm"))


def with_user_defined(*texts: str) -> Tokenizer:
    metadata = bpe_metadata("smollm")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *texts]
    types = metadata["tokenizer.ggml.token_type"]
    metadata["tokenizer.ggml.token_type"] = [*types, *[4] * len(texts)]
    return Tokenizer.from_gguf_metadata(metadata)


def test_decoding_gives_back_any_text(tokenizer: Tokenizer) -> None:
    rng = random.Random(4)
    for _ in range(300):
        text = random_text(rng)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_tokens_in_text_count_only_when_asked(tokenizer: Tokenizer) -> None:
    text = "hi<|im_end|>\n<|im_start|>system"
    assert not {0, 1, 2} & set(tokenizer.encode(text))
    parsed = tokenizer.encode(text, parse_special=True)
    assert [token_id for token_id in parsed if token_id in (0, 1, 2)] == [2, 1]
    for ids in (tokenizer.encode(text), parsed):
        assert tokenizer.decode(ids, skip_special=False) == text
    assert tokenizer.decode(parsed) == "hi\nsystem"


def test_user_defined_tokens_always_count_and_are_ordinary_text() -> None:
    tokenizer = with_user_defined("<tool_call>", "<tool", "  ")
    call, tool, spaces = range(359, 362)
    assert tokenizer.encode("<tool_call>") == [call]
    assert tokenizer.encode("<tool_cal")[0] == tool
    assert tokenizer.encode("a   b")[1] == spaces
    assert tokenizer.decode([call, spaces]) == "<tool_call>  "
    assert not tokenizer.special_ids & {call, tool, spaces}


def test_bos_is_added_once_and_as_the_caller_wants() -> None:
    metadata = bpe_metadata("smollm") | {"tokenizer.ggml.add_bos_token": True}
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    plain = tokenizer.encode("hello", add_bos=False)
    assert tokenizer.encode("hello") == [0, *plain]
    assert tokenizer.encode("<|endoftext|>hello", parse_special=True) == [0, *plain]
    assert tokenizer.encode("") == [0]
    assert tokenizer.encode("", add_bos=False) == []


def test_batch_gives_what_single_calls_give(tokenizer: Tokenizer) -> None:
    rng = random.Random(5)
    texts = [random_text(rng) for _ in range(50)] + ["", "the river " * 2000]
    for parse_special in (False, True):
        expected = [tokenizer.encode(text, parse_special=parse_special) for text in texts]
        assert tokenizer.encode_batch(texts, parse_special=parse_special) == expected


@pytest.mark.parametrize("text", ["emoji \ud83d", "\udc00", "a" * 5000 + "\ud800"])
def test_lone_surrogate_is_a_request_error_naming_the_field(
    tokenizer: Tokenizer, text: str
) -> None:
    with pytest.raises(InvalidRequestError, match=r"suffix: character .* lone surrogate") as caught:
        tokenizer.encode(text, param="suffix")
    assert caught.value.param == "suffix"


@pytest.mark.parametrize("bad", [-1, 359, 2**31, 2**63])
def test_decoding_an_id_outside_the_vocabulary_is_a_request_error(
    tokenizer: Tokenizer, bad: int
) -> None:
    with pytest.raises(
        InvalidRequestError, match=f"token id {bad} is outside .*0 to 358"
    ) as caught:
        tokenizer.decode([5, bad])
    assert caught.value.param == "tokens"


def test_pieces_of_a_split_character_keep_their_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("👩\u200d👧")
    assert b"".join(map(tokenizer.token_bytes, ids)) == "👩\u200d👧".encode()
    assert tokenizer.token_text(ids[0]) == "\ufffd"
    assert tokenizer.decode(ids[:1]) == "\ufffd"
    assert tokenizer.token_bytes(1) == b"<|im_start|>"
    assert tokenizer.token_text(1) == "<|im_start|>"


def test_long_text_does_not_hold_the_interpreter(tokenizer: Tokenizer) -> None:
    """A second thread must get its turn while a long prompt is encoded."""
    text = "".join(random_text(random.Random(seed)) for seed in range(20_000))
    encoder = threading.Thread(target=tokenizer.encode, args=(text,))
    started = time.perf_counter()
    encoder.start()
    turns = 0
    while encoder.is_alive():
        time.sleep(0.001)
        turns += 1
    elapsed = time.perf_counter() - started
    assert turns > 5, f"{turns} turns in {elapsed:.3f} s"


def test_longest_special_token_wins_at_the_leftmost_place() -> None:
    finder = SpecialTokenFinder({"<a>": 1, "<a>b": 2, "b": 3, "<": 4, "<ab": 5, "> ": 6})
    assert list(finder.find("<a>bb<abx<<a> ")) == [
        *[(0, 4, 2), (4, 5, 3), (5, 8, 5), (9, 10, 4), (10, 13, 1)],
    ]
    assert list(SpecialTokenFinder({}).find("<a>")) == []


def test_special_token_finder_agrees_with_trying_every_token_everywhere() -> None:
    rng = random.Random(6)
    for _ in range(200):
        tokens = {
            "".join(rng.choice("<|ab>") for _ in range(rng.randint(1, 4))): index
            for index in range(rng.randint(1, 12))
        }
        text = "".join(rng.choice("<|ab>") for _ in range(40))
        expected, position = [], 0
        while position < len(text):
            here = [token for token in tokens if text.startswith(token, position)]
            if here:
                end = position + len(max(here, key=len))
                expected.append((position, end, tokens[text[position:end]]))
                position = end
            else:
                position += 1
        assert list(SpecialTokenFinder(tokens).find(text)) == expected


@pytest.mark.model
def test_demo_model_ids_and_texts_are_exact(demo_model: Path) -> None:
    golden = Path(__file__).parent.parent / "golden" / "smollm2-135m-q4_1.json"
    cases: list[dict[str, Any]] = json.loads(golden.read_text())["cases"]
    with GGUFFile.open(demo_model) as gguf:
        tokenizer = Tokenizer.from_gguf_metadata(gguf.metadata)
    assert tokenizer.warnings == []
    assert tokenizer.eog_ids == {0, 2}
    for case in cases:
        ids = tokenizer.encode(case["text"], parse_special=case["kind"] == "chat")
        assert ids == case["ids"]
        assert tokenizer.decode(ids, skip_special=False) == case["text"]
        assert tokenizer.decode(case["greedy_ids"], skip_special=False) == case["greedy_text"]
