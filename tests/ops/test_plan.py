"""Native plans against the NumPy oracle, and bit-equal to themselves however a step is cut."""

from __future__ import annotations

import gc
import random
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from caudal import _native
from caudal.config import ActivationDType, KVCacheDType
from caudal.ops import create_backend
from caudal.ops.cpu import CpuBackend, CpuPlan
from caudal.ops.interface import Ops, RopeSpec, Tensor
from caudal.ops.reference import ReferenceBackend
from caudal.step_io import Interrupt, StepInterruptedError
from caudal.weights.dequant import dequantize
from caudal.weights.ggml_types import GGMLType
from tests.ops.tiny_forward import (
    EPS,
    FFN,
    HEAD_DIM,
    HIDDEN,
    SPEC,
    VOCAB,
    Chunk,
    Model,
    compile_plan,
    kv_spec,
    make_batch,
    random_ids,
    supported,
)

ISAS = _native.isa_names()
TWO = [Chunk(random_ids(37), [3, 1, 7]), Chunk(random_ids(20, seed=1), [5, 2])]


def cpu(
    num_threads: int = 2,
    isa: str | None = None,
    activations: ActivationDType = ActivationDType.AUTO,
) -> CpuBackend:
    if isa is not None and isa not in _native.available_isas():
        pytest.skip(f"this CPU cannot run {isa}")
    if activations is ActivationDType.BF16 and not _native.Runtime(isa or "", 1).has_bf16:
        pytest.skip(f"{isa} does not multiply bf16")
    backend = create_backend("cpu", num_threads, isa, activations=activations)
    assert isinstance(backend, CpuBackend)
    return backend


def run(plan: Any, *chunks: Chunk, **arguments: Any) -> np.ndarray:
    """Logits, copied out of the plan's memory."""
    return plan.run(make_batch(*chunks, **arguments)).copy()


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2)))


VARIANTS: dict[str, dict[str, Any]] = {
    "w4": {},
    "w8": {"linear_type": GGMLType.Q8_0},
    "f16": {"linear_type": GGMLType.F16},
    "f32": {"linear_type": GGMLType.F32},
    "bias": {"has_bias": True},
    "qk_norm": {"has_qk_norm": True},
}


@pytest.mark.parametrize("asked", KVCacheDType)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("isa", ISAS)
def test_logits_match_the_oracle(isa: str, variant: str, asked: KVCacheDType) -> None:
    backend = cpu(isa=isa)
    dtype = supported(backend, asked)
    plan, _ = compile_plan(Model(backend, **VARIANTS[variant]), dtype=dtype)
    oracle = ReferenceBackend(dequantize, quantizes_activations=True, isa=isa)
    reference, _ = compile_plan(Model(oracle, **VARIANTS[variant]), dtype=dtype)
    # Additions in another order move a few activations across a rounding boundary, which are
    # further apart for bf16. With an integer cache the kernels also round the query and the
    # weights of the values.
    limit = 1e-2 if dtype is KVCacheDType.F16 else 2e-2
    if isa == "amx":
        limit *= 2
    assert relative_error(run(plan, *TWO), run(reference, *TWO)) < limit
    following = [Chunk([*s.ids, 7], s.blocks, start=len(s.ids)) for s in TWO]
    assert relative_error(run(plan, *following), run(reference, *following)) < limit


def test_rounding_of_activations_is_the_main_error() -> None:
    plan, _ = compile_plan(Model(cpu()))
    reference, _ = compile_plan(Model(ReferenceBackend(dequantize)))
    assert relative_error(run(plan, *TWO), run(reference, *TWO)) < 3e-2


@pytest.mark.parametrize("rope_dim", [HEAD_DIM, HEAD_DIM // 2])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_variants_match_the_oracle(interleaved: bool, rope_dim: int) -> None:
    inv_freq = (100.0 ** (-np.arange(0, rope_dim, 2) / rope_dim)).astype(np.float32)
    rope = RopeSpec(inv_freq, interleaved, attention_factor=1.1)
    kind = {"linear_type": GGMLType.F32}
    plan, _ = compile_plan(Model(cpu(), **kind), rope=rope)
    reference, _ = compile_plan(Model(ReferenceBackend(dequantize), **kind), rope=rope)
    assert relative_error(run(plan, *TWO), run(reference, *TWO)) < 1e-3


@pytest.mark.parametrize("asked", KVCacheDType)
@pytest.mark.parametrize("activations", [ActivationDType.INT12, ActivationDType.BF16])
@pytest.mark.parametrize("isa", ISAS)
def test_logits_are_bit_equal_on_every_isa_and_thread_count(
    isa: str, activations: ActivationDType, asked: KVCacheDType
) -> None:
    dtype = supported(cpu(isa=isa, activations=activations), asked)
    # A tile unit has an arithmetic of its own for int8; compared in test_attention.py.
    reference_isa = isa if dtype is KVCacheDType.INT8 and isa == "amx" else "ref"
    model = Model(cpu(1, reference_isa, activations))
    expected = run(compile_plan(model, dtype=dtype)[0], *TWO)
    for num_threads in (1, 2, 3):
        plan, _ = compile_plan(Model(cpu(num_threads, isa, activations)), dtype=dtype)
        np.testing.assert_array_equal(run(plan, *TWO), expected)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("isa", ISAS)
def test_interrupted_pass_can_be_run_again(isa: str, num_threads: int) -> None:
    plan, _ = compile_plan(Model(cpu(num_threads, isa)))
    expected = run(plan, *TWO)
    signal = np.zeros(1, np.uint32)
    np.testing.assert_array_equal(plan.run(make_batch(*TWO), Interrupt(signal, 0)), expected)
    with pytest.raises(StepInterruptedError):
        plan.run(make_batch(*TWO), Interrupt(signal, 1))
    rng, num_interrupted, is_over = random.Random(num_threads), 0, threading.Event()

    def flip() -> None:
        while not is_over.is_set():
            signal[0] ^= 1
            time.sleep(rng.uniform(0, 3e-4))

    flipper = threading.Thread(target=flip)
    flipper.start()
    for _ in range(300):
        try:
            logits = plan.run(make_batch(*TWO), Interrupt(signal, 0))
        except StepInterruptedError:
            num_interrupted += 1
        else:
            np.testing.assert_array_equal(logits, expected)
    is_over.set()
    flipper.join()
    assert num_interrupted > 0
    np.testing.assert_array_equal(run(plan, *TWO), expected)


def test_oracle_is_interrupted_before_its_pass() -> None:
    plan, _ = compile_plan(Model(ReferenceBackend(dequantize)))
    with pytest.raises(StepInterruptedError):
        plan.run(make_batch(*TWO), Interrupt(np.ones(1, np.uint32), 0))


def test_signal_of_another_shape_or_type_is_refused() -> None:
    plan, _ = compile_plan(Model(cpu()))
    with pytest.raises(ValueError, match="signal"):
        plan.run(make_batch(*TWO), Interrupt(np.zeros(2, np.uint32), 0))
    with pytest.raises(TypeError):
        plan.run(make_batch(*TWO), Interrupt(np.zeros(1, np.int64), 0))  # type: ignore[arg-type]


@pytest.mark.parametrize("isa", ISAS)
def test_logits_are_bit_equal_alone_batched_and_chunked(isa: str) -> None:
    model = Model(cpu(isa=isa))
    first, second = TWO
    together = run(compile_plan(model)[0], first, second)
    alone = run(compile_plan(model)[0], first)
    np.testing.assert_array_equal(together[: len(first.ids)], alone)
    plan, _ = compile_plan(model)
    pieces = []
    for start, count in ((0, 1), (1, 16), (17, 3), (20, 16), (36, 1)):
        chunk = replace(first, start=start, count=count)
        pieces.append(
            run(plan, chunk, replace(second, count=start + 1 if start < 20 else 20))[:count]
        )
    np.testing.assert_array_equal(np.concatenate(pieces), alone)


@pytest.mark.parametrize("variant", ["w4", "w8"])
@pytest.mark.parametrize("isa", ISAS)
def test_many_tokens_at_once_equal_few_at_a_time(isa: str, variant: str) -> None:
    """Other numbers of tokens are cut into other tiles."""
    model = Model(cpu(isa=isa), **VARIANTS[variant])
    whole = Chunk(random_ids(79), [3, 1, 7, 2, 5])
    at_once = run(compile_plan(model)[0], whole)
    plan, _ = compile_plan(model)
    pieces = [replace(whole, start=start, count=count) for start, count in ((0, 64), (64, 15))]
    np.testing.assert_array_equal(np.concatenate([run(plan, piece) for piece in pieces]), at_once)


@pytest.mark.parametrize("down_type", [GGMLType.Q4_1, GGMLType.Q8_0])
@pytest.mark.parametrize("linear_type", [GGMLType.Q4_1, GGMLType.Q8_0])
@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "ref"])
def test_joined_gates_equal_gates_apart(
    isa: str, linear_type: GGMLType, down_type: GGMLType
) -> None:
    """Some kernels leave activated gates as operands of the next product."""
    kinds: dict[str, Any] = {"linear_type": linear_type, "down_type": down_type, "ffn_size": 512}
    activations, num_tokens = ActivationDType.BF16, 67
    models = [Model(cpu(threads, isa, activations), **kinds) for threads in (1, 2)]
    whole = Chunk(random_ids(num_tokens), [3, 1, 7, 2, 5])
    reference, _ = compile_plan(Model(cpu(1, "ref", activations), **kinds))
    expected = run(reference, whole)
    for model in models:
        plan, _ = compile_plan(model)
        np.testing.assert_array_equal(run(plan, whole), expected)
        # One tile of tokens, two, three and four.
        for start, count in ((0, 1), (1, 15), (16, 18), (34, 33)):
            piece = replace(whole, start=start, count=count)
            np.testing.assert_array_equal(run(plan, piece), expected[start : start + count])
        np.testing.assert_array_equal(run(plan, replace(whole, count=64)), expected[:64])


def test_blocks_may_be_anywhere() -> None:
    model = Model(cpu())
    expected = run(compile_plan(model)[0], TWO[0])
    moved = replace(TWO[0], blocks=[23, 0, 11])
    np.testing.assert_array_equal(run(compile_plan(model)[0], moved), expected)


def test_only_wanted_rows_get_logits() -> None:
    plan, _ = compile_plan(Model(cpu()))
    full = run(plan, *TWO)
    np.testing.assert_array_equal(run(plan, *TWO, logits=[56, 0, 36]), full[[56, 0, 36]])
    assert run(plan, *TWO, logits=[]).shape == (0, VOCAB)
    np.testing.assert_array_equal(run(plan, *TWO, logits=[1]), full[[1]])


def test_full_capacity_fits() -> None:
    plan, _ = compile_plan(Model(cpu()))
    chunks = [Chunk(random_ids(10, seed=i), [i]) for i in range(8)]
    alone = run(plan, chunks[7])
    np.testing.assert_array_equal(run(plan, *chunks)[70:], alone)


def test_plan_keeps_what_it_uses_alive() -> None:
    model = Model(cpu())
    plan, cache = compile_plan(model)
    expected = run(plan, *TWO)
    del model, cache
    gc.collect()
    junk = [np.full(100_000, np.nan, np.float32) for _ in range(20)]
    np.testing.assert_array_equal(run(plan, *TWO), expected)
    assert len(junk) == 20


def test_time_is_counted_per_kind_of_op() -> None:
    plan, _ = compile_plan(Model(cpu()))
    assert isinstance(plan, CpuPlan)
    assert set(plan.op_times().values()) == {0.0}
    run(plan, *TWO)
    times = plan.op_times()
    used = {"embed", "linear", "rope_and_cache", "attention", "select_logits"}
    assert {kind for kind, seconds in times.items() if seconds > 0} == used, "norm, gate are fused"
    assert sum(times.values()) < 1


def shared_norm(model: Model, ops: Ops) -> Tensor:
    """A norm that a linear reads, and a residual reads too."""
    layer = model.layers[0]
    normed = ops.rms_norm(ops.embed(model.embedding), layer["attn_norm"], EPS)
    out = ops.linear(normed, layer["output"], residual=normed)
    return ops.linear(ops.select_logits(out), model.lm_head)


def norm_then_select(model: Model, ops: Ops) -> Tensor:
    normed = ops.rms_norm(ops.embed(model.embedding), model.output_norm, EPS)
    return ops.linear(ops.select_logits(normed), model.lm_head)


def late_residual(model: Model, ops: Ops) -> Tensor:
    """A residual that is needed again later must not be overwritten."""
    layer = model.layers[0]
    x = ops.embed(model.embedding)
    a = ops.linear(x, layer["output"], residual=x)
    b = ops.linear(a, layer["output"], residual=x)
    return ops.linear(ops.select_logits(ops.linear(b, layer["output"], residual=a)), model.lm_head)


def norm_of_norm(model: Model, ops: Ops) -> Tensor:
    layer = model.layers[0]
    x = ops.rms_norm(ops.embed(model.embedding), layer["attn_norm"], EPS)
    x = ops.rms_norm(x, layer["ffn_norm"], EPS)
    gated = ops.silu_mul(ops.linear(x, layer["gate_up"]))
    return ops.linear(ops.linear(ops.select_logits(gated), layer["down"]), model.lm_head)


def early_select(model: Model, ops: Ops) -> Tensor:
    layer = model.layers[0]
    x = ops.select_logits(ops.embed(model.embedding))
    gate_up = ops.linear(ops.rms_norm(x, layer["ffn_norm"], EPS), layer["gate_up"])
    return ops.linear(ops.linear(ops.silu_mul(gate_up), layer["down"], residual=x), model.lm_head)


@pytest.mark.parametrize(
    "forward", [shared_norm, norm_then_select, late_residual, norm_of_norm, early_select]
)
def test_fusion_keeps_the_meaning(forward: Any) -> None:
    model = Model(cpu(), linear_type=GGMLType.F32)
    oracle = Model(ReferenceBackend(dequantize), linear_type=GGMLType.F32)
    plan, _ = compile_plan(model, lambda ops: forward(model, ops))
    reference, _ = compile_plan(oracle, lambda ops: forward(oracle, ops))
    wanted = {"logits": [3, 50, 3, 11]}
    error = relative_error(run(plan, *TWO, **wanted), run(reference, *TWO, **wanted))
    assert error < 1e-5


def wrong_features(model: Model, ops: Ops) -> Tensor:
    return ops.linear(ops.embed(model.embedding), model.layers[0]["down"])


def wrong_norm(model: Model, ops: Ops) -> Tensor:
    return ops.rms_norm(ops.embed(model.embedding), np.ones(HIDDEN - 1, np.float32), EPS)


def wrong_layer(model: Model, ops: Ops) -> Tensor:
    layer = model.layers[0]
    qkv = ops.linear(ops.embed(model.embedding), layer["qkv"])
    return ops.select_logits(ops.attention(ops.rope_and_cache(qkv, 5), 5))


def no_select(model: Model, ops: Ops) -> Tensor:
    return ops.linear(ops.embed(model.embedding), model.lm_head)


def wrong_residual(model: Model, ops: Ops) -> Tensor:
    x = ops.embed(model.embedding)
    return ops.linear(ops.select_logits(x), model.lm_head, residual=x)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (wrong_features, f"{HIDDEN} values, {FFN} columns"),
        (wrong_norm, f"{HIDDEN - 1} weights, {HIDDEN} values"),
        (wrong_layer, "outside the KV cache"),
        (no_select, "tokens meets one of logits"),
        (wrong_residual, "features"),
    ],
)
def test_models_whose_shapes_do_not_fit_are_refused(forward: Any, message: str) -> None:
    model = Model(cpu())
    with pytest.raises(ValueError, match=message):
        compile_plan(model, lambda ops: forward(model, ops))


def test_heads_must_fit_the_cache() -> None:
    model = Model(cpu())
    cache = model.backend.create_kv_cache(replace(kv_spec(), num_kv_heads=3))
    with pytest.raises(ValueError, match="multiple of num_kv_heads"):
        model.backend.compile(model.forward, SPEC, cache)
