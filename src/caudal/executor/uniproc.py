"""The executor of one process: loads the model and runs its steps here."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caudal.config import (
    EngineConfig,
    ModelConfig,
    WeightsConfig,
    cache_dir,
    forced_isa,
)
from caudal.errors import ConfigError
from caudal.executor.interface import ExecutorInfo
from caudal.executor.memory_plan import MemoryPlan, plan_memory
from caudal.models.registry import create_model
from caudal.ops import create_backend
from caudal.ops.interface import (
    AttentionSpec,
    Backend,
    BatchArrays,
    KVCacheSpec,
    PackingBackend,
    PlanSpec,
)
from caudal.sampling_params import SamplingParams, StructuredOutputsParams
from caudal.step_io import Interrupt, ModelRunnerOutput, NewRequestData, SchedulerOutput
from caudal.structured_output.constraint import ConstraintFactory
from caudal.structured_output.vocabulary import GrammarVocabulary
from caudal.weights.gguf import GGUFFile
from caudal.weights.loader import WeightLoader
from caudal.weights.model_config import read_model_config
from caudal.weights.packed_cache import PackedCache, PackedWeights
from caudal.weights.special_tokens import eog_token_ids
from caudal.worker.constrained_rows import ConstrainedRows
from caudal.worker.input_batch import InputBatch
from caudal.worker.model_runner import ModelRunner
from caudal.worker.ngram_drafter import NgramDrafter
from caudal.worker.pooler import Pooler

logger = logging.getLogger(__name__)

MIN_LOGITS_ROWS = 64
"""Rows of logits a step can hold even with few sequences (prompt logprobs)."""


class UniProcExecutor:
    """Owns backend, weights, KV cache and model runner of a single rank."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the model. Raises the errors of reading, planning and packing."""
        started = time.perf_counter()
        scheduler = config.scheduler
        self._max_num_batched_tokens = scheduler.max_num_batched_tokens
        if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({scheduler.max_num_batched_tokens}) must be at least "
                f"--max-num-seqs ({scheduler.max_num_seqs})"
            )
        with GGUFFile.open(config.model_path) as gguf:
            model_config = read_model_config(gguf)
            memory = plan_memory(
                model_config, gguf.tensors.values(), config.cache, config.scheduler
            )
            logger.info("%s", memory.describe())
            if memory.is_shortened:
                logger.warning(
                    "the model's context of %d tokens does not fit memory; serving %d",
                    model_config.context_length,
                    memory.max_model_len,
                )
            backend = _create_backend(config)
            packed = _open_packed(config.weights, gguf, backend)
            loader = WeightLoader(
                gguf.tensors,
                backend,
                rank=config.parallel.rank,
                world_size=config.parallel.world_size,
                packed=packed,
            )
            eog = eog_token_ids(gguf.metadata)
            self._constrained = _create_constrained_rows(config, eog)
            self._runner = _create_runner(config, model_config, memory, loader, self._constrained)
            self._info = ExecutorInfo(
                model=model_config,
                memory=memory,
                eog_token_ids=eog,
                max_num_logits=_max_num_logits(config),
                isa=backend.isa,
                num_threads=backend.num_threads,
                load_ms=0.0,
            )
        self._warm_up()
        if packed is not None:
            packed.store_in_background()
        self._info = replace(self._info, load_ms=(time.perf_counter() - started) * 1e3)

    @property
    def info(self) -> ExecutorInfo:
        """What is fixed since loading."""
        return self._info

    def prepare(self, params: StructuredOutputsParams) -> Future[Any]:
        """Compile a grammar in a thread."""
        return self._constrained.factory.prepare(params)

    def execute(
        self, output: SchedulerOutput, interrupt: Interrupt | None = None
    ) -> ModelRunnerOutput:
        """Compute one step in this process."""
        return self._runner.execute(output, interrupt)

    def run_plan(self, batch: BatchArrays) -> NDArray[np.float32]:
        """The bare forward pass, without rows or sampling -> logits [num_logits, vocab]."""
        return self._runner.plan.run(batch)

    def inject_fault(self, request_id: str, after_output_tokens: int) -> None:
        """Tests only: see Executor."""
        self._runner.faults[request_id] = after_output_tokens

    def shutdown(self) -> None:
        """End the threads; memory goes with the process."""
        self._constrained.shutdown()

    def _warm_up(self) -> None:
        """One real step, so that readiness means that the kernels have run."""
        num_tokens = min(2, self._max_num_batched_tokens)
        request = NewRequestData(
            request_id="warm-up",
            token_ids=[0] * num_tokens,
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(temperature=0.0, max_tokens=1),
            seed=0,
            block_ids=[0],
            num_computed_tokens=0,
        )
        step = SchedulerOutput(
            step_id=0,
            new_requests=[request],
            num_scheduled_tokens={"warm-up": num_tokens},
            num_tokens=num_tokens,
        )
        errors = self.execute(step).errors
        if errors:
            raise ArithmeticError(f"the first step failed: {errors['warm-up']}")
        self.execute(SchedulerOutput(step_id=0, finished_request_ids=["warm-up"]))


def _create_backend(config: EngineConfig) -> Backend:
    return create_backend(
        num_threads=config.parallel.num_threads,
        isa=forced_isa(),
        activations=config.weights.activation_dtype,
    )


def _open_packed(config: WeightsConfig, gguf: GGUFFile, backend: Backend) -> PackedWeights | None:
    """The weights as an earlier start packed them, or where to keep those of this one."""
    if not config.packed_cache or not isinstance(backend, PackingBackend):
        return None
    directory = config.packed_cache_dir or cache_dir() / "packed"
    return PackedCache(directory).open(gguf, backend)


def _max_num_logits(config: EngineConfig) -> int:
    return max(config.scheduler.max_num_seqs, MIN_LOGITS_ROWS)


def _create_constrained_rows(config: EngineConfig, eog: frozenset[int]) -> ConstrainedRows:
    factory = ConstraintFactory(lambda: GrammarVocabulary.from_file(config.model_path))
    return ConstrainedRows(factory, eog)


def _create_runner(
    config: EngineConfig,
    model_config: ModelConfig,
    memory: MemoryPlan,
    loader: WeightLoader,
    constrained: ConstrainedRows,
) -> ModelRunner:
    """Pack the weights, allocate the cache and record the forward pass."""
    backend = loader.backend
    model = create_model(model_config, loader)
    heads = AttentionSpec(
        num_heads=model_config.num_heads,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        scale=model_config.head_dim**-0.5,
    )
    kv_cache = backend.create_kv_cache(
        KVCacheSpec(
            num_layers=model_config.num_layers,
            num_blocks=memory.num_blocks,
            num_kv_heads=model_config.num_kv_heads,
            head_dim=model_config.head_dim,
            block_size=config.cache.block_size,
            dtype=backend.kv_cache_dtype(config.cache.kv_cache_dtype),
        )
    )
    spec = PlanSpec(
        attention=heads,
        rope=model.rope,
        rms_norm_eps=model_config.rms_norm_eps,
        hidden_size=model_config.hidden_size,
        vocab_size=model_config.vocab_size,
        max_num_tokens=config.scheduler.max_num_batched_tokens,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_logits=_max_num_logits(config),
    )
    batch = InputBatch(config.scheduler.max_num_seqs, memory.max_model_len, config.cache.block_size)
    pooling_spec = replace(spec, max_num_logits=spec.max_num_tokens)
    pooler = Pooler(
        backend, batch, lambda: backend.compile(model.hidden_states, pooling_spec, kv_cache)
    )
    plan = backend.compile(model.forward, spec, kv_cache)
    runner = ModelRunner(backend, plan, batch, pooler, constrained)
    if config.scheduler.num_speculative_tokens:
        runner.drafter = NgramDrafter(batch, config.scheduler.num_speculative_tokens)
    return runner
