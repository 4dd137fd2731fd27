"""Hyper-parameters, vocabulary and tensor shapes: contradictions are named before loading."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caudal.config import ModelConfig, RopeScaling
from caudal.errors import ModelFileError, UnsupportedModelError
from caudal.models.registry import ARCHITECTURES
from caudal.weights.gguf import GGMLType, GGUFFile
from caudal.weights.gguf_header import ValueType
from caudal.weights.model_config import KNOWN_ARCHITECTURES, read_model_config
from caudal.weights.vocabulary import special_token_id
from tests.tiny_models import make_tiny_model
from tests.weights.gguf_writer import Typed, write_gguf


def _read(folder: Path, arch: str = "llama", **overrides: Any) -> ModelConfig:
    with GGUFFile.open(make_tiny_model(folder / "model.gguf", arch, **overrides)) as gguf:
        return read_model_config(gguf)


def _f32(*shape: int, value: float = 1.0) -> tuple[GGMLType, Any]:
    return GGMLType.F32, np.full(shape, value, np.float32)


def _raw(ggml_type: GGMLType, rows: int, columns: int) -> tuple[GGMLType, Any]:
    row_bytes = columns // ggml_type.block_size * ggml_type.block_bytes
    return ggml_type, np.zeros((rows, row_bytes), np.uint8)


def test_known_architectures_are_those_with_a_model() -> None:
    assert set(KNOWN_ARCHITECTURES) == set(ARCHITECTURES)


def test_llama_values(tmp_path: Path) -> None:
    config = _read(tmp_path, rope_theta=5e5, rms_norm_eps=2**-17, num_layers=3)
    assert config == ModelConfig(
        architecture="llama",
        name="Tiny llama",
        num_layers=3,
        hidden_size=128,
        intermediate_size=256,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocab_size=359,
        context_length=512,
        rms_norm_eps=2**-17,
        rope_theta=5e5,
        rope_dim=32,
        rope_interleaved=True,
    )


def test_qwen_families_differ_from_llama_where_they_should(tmp_path: Path) -> None:
    qwen2 = _read(tmp_path, "qwen2", tied=True)
    assert (qwen2.has_qkv_bias, qwen2.has_qk_norm, qwen2.rope_interleaved) == (True, False, False)
    assert qwen2.is_tied
    qwen3 = _read(tmp_path, "qwen3")
    assert (qwen3.has_qkv_bias, qwen3.has_qk_norm, qwen3.rope_interleaved) == (False, True, False)
    assert not qwen3.is_tied


def test_defaults_follow_from_other_values(tmp_path: Path) -> None:
    removed = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    config = _read(
        tmp_path,
        num_kv_heads=4,
        metadata={
            **{f"llama.{key}": None for key in (*removed, "attention.head_count_kv")},
            "llama.rope.freq_base": None,
            "general.name": None,
        },
    )
    assert (config.head_dim, config.rope_dim, config.num_kv_heads) == (32, 32, 4)
    assert (config.rope_theta, config.name) == (10_000.0, "llama")


def test_value_given_per_layer_is_accepted_when_uniform(tmp_path: Path) -> None:
    key = "llama.attention.head_count"
    assert _read(tmp_path, metadata={key: [4, 4]}).num_heads == 4
    with pytest.raises(UnsupportedModelError, match="head_count' differs between layers"):
        _read(tmp_path, metadata={key: [4, 2]})
    with pytest.raises(ModelFileError, match="head_count' is an empty array"):
        _read(tmp_path, metadata={key: np.array([], np.int32)})


@pytest.mark.parametrize("arch", ["gemma3", "", "x" * 5000])
def test_unknown_architecture_lists_known_ones_without_reading_weights(
    tmp_path: Path, arch: str
) -> None:
    """B101."""
    metadata = {"general.architecture": arch}
    path = write_gguf(tmp_path / "m.gguf", metadata, {"w": _raw(GGMLType.IQ1_S, 4, 256)})
    started = time.process_time()
    with (
        GGUFFile.open(path) as gguf,
        pytest.raises(UnsupportedModelError, match="known: llama, qwen2, qwen3") as caught,
    ):
        read_model_config(gguf)
    assert time.process_time() - started < 1
    assert len(str(caught.value)) < 300


def test_missing_architecture_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {})
    with GGUFFile.open(path) as gguf, pytest.raises(ModelFileError, match=r"general\.architecture"):
        read_model_config(gguf)


NAN, INF = float("nan"), float("inf")
BAD_VALUES = [
    ("llama.block_count", 0, "must be 1 to 1024, got 0"),
    ("llama.block_count", 2**32 - 1, "must be 1 to 1024"),
    ("llama.block_count", "2", "must be int, but holds str"),
    ("llama.block_count", None, "'llama.block_count' is missing"),
    ("llama.block_count", Typed(ValueType.INT32, -1), "must be 1 to 1024, got -1"),
    ("llama.block_count", 2.0, "must be int, but holds float"),
    ("llama.block_count", True, "must be int, but holds bool"),
    ("llama.context_length", 0, "must be 1 to"),
    ("llama.context_length", 2**40, "must be 1 to"),
    ("llama.embedding_length", 2**63, "must be 1 to"),
    ("llama.feed_forward_length", 0, "must be 1 to"),
    ("llama.attention.head_count", 0, "must be 1 to"),
    ("llama.attention.head_count", 3, "'llama.attention.head_count' is 3, not a multiple of the 2"),
    ("llama.attention.head_count_kv", 0, "must be 1 to 4"),
    ("llama.attention.head_count_kv", 3, "not a multiple of the 3 key-value heads"),
    ("llama.attention.head_count_kv", 8, "must be 1 to 4, got 8"),
    ("llama.attention.key_length", 0, "must be 2 to"),
    ("llama.attention.key_length", 33, "must be even"),
    ("llama.rope.dimension_count", 0, "must be 2 to 32"),
    ("llama.rope.dimension_count", 64, "must be 2 to 32, got 64"),
    ("llama.rope.dimension_count", 31, "must be even, got 31"),
    ("llama.attention.layer_norm_rms_epsilon", 0.0, "must be 1e-12 to 1"),
    ("llama.attention.layer_norm_rms_epsilon", NAN, "must be 1e-12 to 1, got nan"),
    ("llama.attention.layer_norm_rms_epsilon", None, "is missing"),
    ("llama.rope.freq_base", -1.0, "must be 2 to"),
    ("llama.rope.freq_base", INF, "must be 2 to"),
    ("llama.rope.freq_base", 10_000, "must be float, but holds int"),
    ("llama.rope.scaling.factor", NAN, "must be 0 to"),
    ("llama.rope.scaling.type", 3, "must be str, but holds int"),
    ("tokenizer.ggml.tokens", None, "'tokenizer.ggml.tokens' is missing"),
    ("tokenizer.ggml.tokens", [1, 2, 3], "'tokenizer.ggml.tokens' must be an array of str"),
    ("tokenizer.ggml.tokens", [], "'tokenizer.ggml.tokens' is empty"),
    ("tokenizer.ggml.tokens", ["a", "b"], "'tokenizer.ggml.token_type' must have 2 elements"),
    ("tokenizer.ggml.merges", [1, 2], "'tokenizer.ggml.merges' must be an array of str"),
    ("tokenizer.ggml.token_type", np.ones(358, np.int32), "must have 359 elements, but has 358"),
    ("tokenizer.ggml.token_type", np.ones(359, np.float32), "must be an array of int, but holds"),
    ("tokenizer.ggml.token_type", np.full(359, 7, np.int32), "must hold 0 to 6, but has values"),
    ("tokenizer.ggml.token_type", np.full(359, -1, np.int32), "must hold 0 to 6, but has values"),
    ("tokenizer.ggml.token_type", 1, "must be an array of int, but holds int"),
    (
        "tokenizer.ggml.scores",
        np.zeros(359, np.uint8),
        "'tokenizer.ggml.scores' must be an array of float, but holds an array of int",
    ),
    ("tokenizer.ggml.scores", np.zeros(360, np.float32), "must have 359 elements, but has 360"),
]


@pytest.mark.parametrize(("key", "value", "message"), BAD_VALUES)
def test_bad_value_is_named_with_its_range(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        _read(tmp_path, metadata={key: value})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.expert_count", 8, "mixture-of-experts"),
        ("llama.attention.value_length", 64, "32 key and 64 value dimensions"),
        ("llama.rope.scaling.type", "longrope", "'longrope' is not supported; known: none, linear"),
        ("llama.feed_forward_length", 200, "200, not a multiple of 32"),
    ],
)
def test_unsupported_feature_is_refused(tmp_path: Path, key: str, value: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        _read(tmp_path, metadata={key: value})


def test_vocabulary_of_another_size_than_the_embedding(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.token_type": None,
    }
    with pytest.raises(ModelFileError, match=r"has 2 tokens, but .*'token_embd.weight' has 359"):
        _read(tmp_path, metadata=metadata)


def test_indivisible_heads_without_key_length(tmp_path: Path) -> None:
    metadata = {
        "llama.attention.key_length": None,
        "llama.attention.head_count": 12,
        "llama.attention.head_count_kv": 4,
    }
    with pytest.raises(ModelFileError, match="embedding_length' is 128, not a multiple of 12"):
        _read(tmp_path, metadata=metadata)


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("llama", "token_embd.weight"),
        ("llama", "output_norm.weight"),
        ("llama", "blk.1.ffn_down.weight"),
        ("qwen2", "blk.0.attn_k.bias"),
        ("qwen3", "blk.1.attn_q_norm.weight"),
    ],
)
def test_missing_tensor_is_named(tmp_path: Path, arch: str, name: str) -> None:
    with pytest.raises(ModelFileError, match=f"1 tensors are missing: '{name}'"):
        _read(tmp_path, arch, tensors={name: None})


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"9 tensors .*: 'blk\.2\.attn_norm\.weight', "):
        _read(tmp_path, metadata={"llama.block_count": 3})


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("blk.0.attn_norm.weight", _f32(64), r"shape \[64\], expected \[128\]"),
        ("blk.0.attn_q.weight", _f32(128, 64), r"shape \[128, 64\], expected \[128, 128\]"),
        ("blk.1.attn_v.weight", _f32(128, 64), r"\[128, 64\], expected \[64, 128\]"),
        ("blk.1.ffn_up.weight", _f32(256 * 128), r"\[32768\], expected \[256, 128\]"),
        ("output.weight", _f32(358, 128), r"\[358, 128\], expected \[359, 128\]"),
        ("token_embd.weight", _f32(359, 64), r"\[359, 64\], expected \[359, 128\]"),
        ("rope_freqs.weight", _f32(32), r"\[32\], expected \[16\]"),
        ("rope_freqs.weight", _f32(16, value=0.0), "finite values above 0"),
        ("rope_freqs.weight", _f32(16, value=NAN), "finite values above 0"),
    ],
)
def test_misshapen_tensor_is_named(tmp_path: Path, name: str, tensor: Any, message: str) -> None:
    with pytest.raises(ModelFileError, match=f"'{name}'.*{message}"):
        _read(tmp_path, tensors={name: tensor})


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("output.weight", _raw(GGMLType.IQ4_NL, 359, 128), "IQ4_NL.*F32, F16, Q4_0"),
        ("blk.0.ffn_gate.weight", _raw(GGMLType.Q8_1, 256, 128), "Q8_1"),
        ("blk.0.attn_norm.weight", _raw(GGMLType.Q8_0, 1, 128), None),
        ("blk.0.attn_norm.weight", (GGMLType.Q8_0, np.zeros(136, np.uint8)), "Q8_0.*vectors: F32"),
        ("blk.0.attn_q.bias", _f32(128), "llama with 'blk.0.attn_q.bias' is not supported"),
        ("blk.1.attn_output.scale", _f32(1), "llama with 'blk.1.attn_output.scale'"),
    ],
)
def test_unsupported_tensor_is_refused_by_name(
    tmp_path: Path, name: str, tensor: Any, message: str | None
) -> None:
    expected = ModelFileError if message is None else UnsupportedModelError
    with pytest.raises(expected, match=message or "expected"):
        _read(tmp_path, tensors={name: tensor})


def test_unused_tensor_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {"blk.0.attn_rot_embd.weight": _f32(16), "extra": _raw(GGMLType.IQ2_S, 1, 256)}
    with caplog.at_level(logging.INFO, logger="caudal.weights"):
        assert _read(tmp_path, tensors=extra).num_layers == 2
    assert "2 unused tensors: 'blk.0.attn_rot_embd.weight', 'extra'" in caplog.text


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, RopeScaling()),
        ({"type": "none", "factor": 4.0}, RopeScaling()),
        ({"type": "linear", "factor": 4.0}, RopeScaling("linear", 4.0)),
        ({"factor": 2.0}, RopeScaling("linear", 2.0)),
        ({"factor": 0.0}, RopeScaling()),
        ({"type": "yarn", "factor": 4.0}, RopeScaling("yarn", 4.0, 512)),
        (
            {"type": "yarn", "factor": 4.0, "yarn_attn_factor": 0.5},
            RopeScaling("yarn", 4.0, 512, attention_factor=0.5),
        ),
        (
            {
                "type": "yarn",
                "factor": 4.0,
                "original_context_length": 256,
                "attn_factor": 0.5,
                "yarn_beta_fast": 16.0,
                "yarn_beta_slow": 2.0,
                "yarn_ext_factor": 0.0,
            },
            RopeScaling("yarn", 4.0, 256, 0.5, 16.0, 2.0, 0.0),
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, values: dict[str, Any], expected: RopeScaling) -> None:
    metadata = {f"llama.rope.scaling.{key}": value for key, value in values.items()}
    assert _read(tmp_path, metadata=metadata).rope_scaling == expected


def test_yarn_betas_in_wrong_order_are_refused(tmp_path: Path) -> None:
    values = {"type": "yarn", "factor": 4.0, "yarn_beta_fast": 1.0, "yarn_beta_slow": 32.0}
    metadata = {f"llama.rope.scaling.{key}": value for key, value in values.items()}
    with pytest.raises(ModelFileError, match=r"yarn_beta_fast' is 1.0, not above yarn_beta_slow"):
        _read(tmp_path, metadata=metadata)


def test_llama3_rope_factors_are_recognised(tmp_path: Path) -> None:
    scaling = _read(tmp_path, tensors={"rope_freqs.weight": _f32(16)}).rope_scaling
    assert scaling == RopeScaling("llama3")


@pytest.mark.parametrize(
    ("value", "expected"), [(2, 2), (358, 358), (359, None), (2**32 - 1, None), (None, None)]
)
def test_special_token_outside_the_vocabulary_is_dropped(
    tmp_path: Path, value: int | None, expected: int | None
) -> None:
    metadata = {"tokenizer.ggml.bos_token_id": value}
    with GGUFFile.open(make_tiny_model(tmp_path / "m.gguf", metadata=metadata)) as gguf:
        assert special_token_id(gguf, "bos") == expected


def test_sentencepiece_vocabulary_is_accepted(tmp_path: Path) -> None:
    assert _read(tmp_path, tokenizer="llama").vocab_size > 259


@pytest.mark.parametrize(
    "linear_type",
    [GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q8_0, GGMLType.F16, GGMLType.F32, GGMLType.BF16],
)
def test_tiny_models_of_every_simple_type_load(tmp_path: Path, linear_type: GGMLType) -> None:
    assert _read(tmp_path, linear_type=linear_type).num_layers == 2


@pytest.mark.parametrize("linear_type", [GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K])
def test_tiny_models_of_k_types_load(tmp_path: Path, linear_type: GGMLType) -> None:
    config = _read(tmp_path, linear_type=linear_type, hidden=256, ffn=256, head_dim=64)
    assert config.head_dim == 64


def test_tiny_models_repeat_by_seed(tmp_path: Path) -> None:
    one = make_tiny_model(tmp_path / "a.gguf", seed=3).read_bytes()
    assert make_tiny_model(tmp_path / "b.gguf", seed=3).read_bytes() == one
    assert make_tiny_model(tmp_path / "c.gguf", seed=4).read_bytes() != one
