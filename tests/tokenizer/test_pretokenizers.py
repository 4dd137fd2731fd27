"""Where byte-level vocabularies cut words; a wrong cut gives ids the model has never seen."""

from __future__ import annotations

import logging
import random

import pytest

from caudal.tokenizer import Tokenizer
from caudal.tokenizer.pretokenizers import find_pre_tokenizer
from caudal.weights.token_bytes import byte_characters
from tests.tiny_vocabulary import bpe_metadata
from tests.tokenizer.naive import merge_by_rank, random_text


def words(pre: str, text: str) -> list[str]:
    warnings: list[str] = []
    cut = find_pre_tokenizer(pre, warnings).build().pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in cut]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["12345"]),
        ("smollm", ["1", "2", "3", "4", "5"]),
        ("qwen2", ["1", "2", "3", "4", "5"]),
        ("tekken", ["1", "2", "3", "4", "5"]),
        ("deepseek-coder", ["1", "2", "3", "4", "5"]),
        ("llama-bpe", ["123", "45"]),
        ("default", ["123", "45"]),
    ],
)
def test_digits_are_grouped_as_each_family_does(pre: str, expected: list[str]) -> None:
    assert words(pre, "12345") == expected


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "a  b\n\n c", ["a", " ", " b", "\n\n", " c"]),
        ("llama-bpe", "a  b\n\n c", ["a", " ", " b", "\n\n", " c"]),
        ("llama-bpe", "x!!\r\n\r\ny", ["x", "!!\r\n\r\n", "y"]),
        ("gpt-2", "x!!\r\ny", ["x", "!!", "\r", "\n", "y"]),
        ("llama-bpe", "\tfoo(bar)", ["\tfoo", "(bar", ")"]),
        ("gpt-2", "\tfoo(bar)", ["\t", "foo", "(", "bar", ")"]),
        ("llama-bpe", "I'LL don't", ["I", "'LL", " don", "'t"]),
        ("gpt-2", "I'LL don't", ["I", "'", "LL", " don", "'t"]),
        ("qwen2", " trailing   ", [" trailing", "   "]),
        ("smollm", "at  100", ["at", "  ", "1", "0", "0"]),
        ("smollm", "½ cup Ⅷ", ["½", " cup", " ", "Ⅷ"]),
        ("llama-bpe", "e\u0301te\u0301", ["e", "\u0301te", "\u0301"]),
        ("tekken", "HelloWORLDfoo", ["Hello", "WORLDfoo"]),
        ("default", "a+b==c `x`", ["a", "+", "b", "==", "c", " `", "x", "`"]),
        ("deepseek-coder", "x = 日本1;\n", ["x", " =", " ", "日本", "1", ";", "\n"]),
        ("qwen2", "👩\u200d👧 ok", ["👩\u200d👧", " ok"]),
        ("llama-bpe", "日本語、テスト", ["日本語", "、テスト"]),
    ],
)
def test_words_are_cut_as_each_family_does(pre: str, text: str, expected: list[str]) -> None:
    assert words(pre, text) == expected


@pytest.mark.parametrize(
    "pre", ["smollm", "gpt-2", "llama-bpe", "qwen2", "tekken", "default", "deepseek-coder"]
)
def test_no_text_is_lost_or_reordered_by_cutting(pre: str) -> None:
    rng = random.Random(1)
    for _ in range(300):
        text = random_text(rng)
        assert "".join(words(pre, text)) == text


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "default"])
def test_ids_equal_bpe_by_definition_on_each_word(pre: str) -> None:
    metadata = bpe_metadata(pre) | {"tokenizer.ggml.add_bos_token": False}
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    characters = byte_characters()
    rng = random.Random(2)
    for _ in range(200):
        text = random_text(rng)
        expected = []
        for word in words(pre, text):
            symbols = merge_by_rank([characters[value] for value in word.encode()], ranks)
            expected += [tokens.index(symbol) for symbol in symbols]
        assert tokenizer.encode(text) == expected, repr(text)


def test_word_that_is_a_token_is_taken_whole_only_where_the_family_does() -> None:
    def ids(pre: str) -> list[int]:
        metadata = bpe_metadata(pre) | {"tokenizer.ggml.add_bos_token": False}
        metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "zqz"]
        metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
        return Tokenizer.from_gguf_metadata(metadata).encode("zqz")

    assert ids("llama-bpe") == [359]
    assert len(ids("smollm")) == 3


def test_qwen2_normalises_decomposed_text_and_others_do_not() -> None:
    qwen = Tokenizer.from_gguf_metadata(bpe_metadata("qwen2"))
    assert qwen.encode("Cafe\u0301") == qwen.encode("Café")
    smollm = Tokenizer.from_gguf_metadata(bpe_metadata("smollm"))
    assert smollm.encode("Cafe\u0301") != smollm.encode("Café")


@pytest.mark.parametrize(
    ("pre", "message"),
    [
        (None, "tokenizer.ggml.pre is missing"),
        ("unknown-x", "tokenizer.ggml.pre 'unknown-x' is unknown"),
        ("smaug-bpe", "tokenizer.ggml.pre 'smaug-bpe' is not verified"),
    ],
)
def test_guessed_rules_are_never_silent(
    pre: str | None, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    metadata = bpe_metadata("x") | {"tokenizer.ggml.pre": pre}
    with caplog.at_level(logging.WARNING):
        tokenizer = Tokenizer.from_gguf_metadata({k: v for k, v in metadata.items() if v != pre})
        if pre is not None:
            tokenizer = Tokenizer.from_gguf_metadata(metadata)
    assert any(warning.startswith(message) for warning in tokenizer.warnings)
    assert message in caplog.text


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "llama3", "qwen2", "gpt-2", "default"])
def test_known_rules_give_no_warning(pre: str) -> None:
    assert Tokenizer.from_gguf_metadata(bpe_metadata(pre)).warnings == []


def test_llama_prompts_start_with_bos_unless_the_file_says_otherwise() -> None:
    metadata = bpe_metadata("llama-bpe")
    del metadata["tokenizer.ggml.add_bos_token"]
    assert Tokenizer.from_gguf_metadata(metadata).encode("a")[0] == 0
    metadata["tokenizer.ggml.add_bos_token"] = False
    assert Tokenizer.from_gguf_metadata(metadata).encode("a")[0] != 0
