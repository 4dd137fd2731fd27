"""How byte-level BPE vocabularies cut text into words, by `tokenizer.ggml.pre`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from tokenizers import Regex
from tokenizers.normalizers import NFC, Normalizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _isolate(*patterns: str) -> PreTokenizer:
    """Cuts at each match of each pattern in turn, then writes bytes as characters."""
    splits: list[PreTokenizer] = [Split(Regex(pattern), "isolated") for pattern in patterns]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _default() -> PreTokenizer:
    # What llama.cpp does for files that name no pre-tokenizer, so that ids agree with it.
    return _isolate(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


def _deepseek_coder() -> PreTokenizer:
    return _isolate(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")


@dataclass(frozen=True, slots=True)
class PreTokenizerSpec:
    """One way of cutting text, and the model settings that always come with it."""

    build: Callable[[], PreTokenizer]
    ignore_merges: bool = False
    """A word that is a token is taken whole, even if no merges lead to it."""
    add_bos: bool = False
    """Whether prompts start with BOS where the file does not say."""
    nfc: bool = False
    """Text is normalised to Unicode NFC first."""
    is_assumed: bool = False
    """The name is known, but whether the rules are exactly these is not."""

    def normalizer(self) -> Normalizer | None:
        return NFC() if self.nfc else None


_Table: TypeAlias = dict[str, PreTokenizerSpec]


def _specs() -> _Table:
    gpt2 = PreTokenizerSpec(_gpt2)
    digits = PreTokenizerSpec(_single_digits)
    llama3 = PreTokenizerSpec(lambda: _isolate(_LLAMA3), ignore_merges=True, add_bos=True)
    llama3_rules = PreTokenizerSpec(lambda: _isolate(_LLAMA3))
    smaug = PreTokenizerSpec(lambda: _isolate(_LLAMA3), is_assumed=True)
    qwen2 = PreTokenizerSpec(lambda: _isolate(_QWEN2), nfc=True)
    qwen2_rules = PreTokenizerSpec(lambda: _isolate(_QWEN2))
    tekken = PreTokenizerSpec(lambda: _isolate(_TEKKEN), ignore_merges=True, add_bos=True)
    return {
        "default": PreTokenizerSpec(_default),
        **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), gpt2),
        **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "command-r"), digits),
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), llama3),
        **dict.fromkeys(("falcon3", "pixtral", "lfm2"), llama3),
        **dict.fromkeys(("dbrx", "glm4", "chatglm-bpe"), llama3_rules),
        "smaug-bpe": smaug,
        "qwen2": qwen2,
        **dict.fromkeys(("deepseek-r1-qwen", "megrez", "stablelm2"), qwen2_rules),
        "tekken": tekken,
        "deepseek-coder": PreTokenizerSpec(_deepseek_coder),
    }


def find_pre_tokenizer(pre: str | None, warnings: list[str]) -> PreTokenizerSpec:
    """The rules for `tokenizer.ggml.pre`; appends to `warnings` where they are a guess."""
    specs = _specs()
    if pre is None:
        warnings.append(
            "tokenizer.ggml.pre is missing: text is cut by the default rules, which may differ "
            "from those the model was trained with and degrade its answers"
        )
        return specs["default"]
    spec = specs.get(pre)
    if spec is None:
        warnings.append(
            f"tokenizer.ggml.pre {pre[:60]!r} is unknown: text is cut by the default rules, which "
            "may differ from those the model was trained with and degrade its answers"
        )
        return specs["default"]
    if spec.is_assumed:
        warnings.append(
            f"tokenizer.ggml.pre {pre!r} is not verified: text is cut by the rules of llama-bpe"
        )
    return spec
