"""Tokenizer metadata for tiny models: byte-level BPE and SentencePiece-style vocabularies."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
"""Token types of `tokenizer.ggml.token_type`."""

BPE_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_TEXT = (
    "the river runs through the old town and the people of the town come to the river in the "
    "morning there is a small bridge over the water and on the other side of the bridge stands "
    "a house with a red door where an old man tells stories about the time when the river was "
    "wide and the boats were many he says that water remembers everything and that those who "
    "listen will hear the rain of last year in it system user assistant hello world"
)


def byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte value (as in GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = [chr(value) for value in range(256)]
    others = (value for value in range(256) if value not in printable)
    for index, value in enumerate(others):
        table[value] = chr(256 + index)
    return table


@lru_cache
def learn_merges(space: str, count: int) -> tuple[tuple[str, str], ...]:
    """The first `count` BPE merges of a fixed English text, words prefixed by `space`."""
    words = [list(space + word) for word in _TEXT.split()]
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        # Ties go to the smaller pair, so that the vocabulary never depends on hashing.
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for word in words:
            index = 0
            while index < len(word) - 1:
                if (word[index], word[index + 1]) == best:
                    word[index : index + 2] = ["".join(best)]
                index += 1
    return tuple(merges)


def bpe_metadata(pre: str, num_merges: int = 100) -> dict[str, Any]:
    """Byte-level BPE ("gpt2"): 3 specials, 256 bytes, then one token per merge."""
    merges = learn_merges("\u0120", num_merges)
    tokens = [*BPE_SPECIALS, *byte_characters(), *("".join(merge) for merge in merges)]
    types = [CONTROL] * len(BPE_SPECIALS) + [NORMAL] * (len(tokens) - len(BPE_SPECIALS))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": CHATML_TEMPLATE,
    }


def spm_metadata(num_merges: int = 100) -> dict[str, Any]:
    """SentencePiece-style BPE ("llama"): unk, bos, eos, 256 bytes, pieces with scores."""
    merges = learn_merges("\u2581", num_merges)
    letters = sorted({letter for merge in merges for letter in "".join(merge)})
    joined = ["".join(merge) for merge in merges]
    specials = ["<unk>", "<s>", "</s>"]
    raw_bytes = [f"<0x{value:02X}>" for value in range(256)]
    tokens = [*specials, *raw_bytes, *joined, *letters]
    # A piece that merges earlier has the higher score; single letters come last.
    ranks = -np.arange(len(joined) + len(letters), dtype=np.float32)
    scores = np.concatenate([np.zeros(len(specials) + 256, np.float32), ranks])
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(ranks)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": True,
    }
