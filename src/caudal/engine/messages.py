"""Messages between the server process and the engine process (msgspec over ZMQ)."""

from __future__ import annotations

import msgspec

from caudal.sampling_params import SamplingParams
from caudal.scheduler.output import RequestOutput
from caudal.scheduler.service_class import ServiceClass
from caudal.scheduler.step_cost import StepCosts


class EngineRequest(msgspec.Struct, kw_only=True, omit_defaults=True, tag="request"):
    """A validated request. `n > 1` is several of these with one `parent_id`."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    """Lower runs first (as in vLLM), within one class."""
    service: ServiceClass = ServiceClass.INTERACTIVE
    """Offline batches are of the other classes."""
    namespace: str = ""
    """Root of the prefix tree: requests of different namespaces never share KV."""
    tenant: str = ""
    """Who takes turns with others of the same priority."""
    weight: float = 1.0
    """The tenant's share of the machine, relative to that of others."""
    timeout_s: float | None = None
    """Seconds after which the request ends with `timeout`, wherever it is then."""
    parent_id: str | None = None
    num_siblings: int = 1
    """Requests with this parent_id, itself included; they are admitted or refused together."""


class AbortRequests(msgspec.Struct, kw_only=True, tag="abort"):
    """The client has left (or a stop string matched): free these requests."""

    request_ids: list[str]
    is_answered: bool = False
    """Their answers are complete: what they are long is how long answers are."""


class Drain(msgspec.Struct, kw_only=True, tag="drain"):
    """Refuse new requests, finish the running ones, then exit."""


class Shutdown(msgspec.Struct, kw_only=True, tag="shutdown"):
    """Exit at once; every open request gets its terminal output."""


class DebugFault(msgspec.Struct, kw_only=True, tag="fault"):
    """Make `request_id` raise inside a step after so many output tokens (tests only)."""

    request_id: str
    after_output_tokens: int


class InspectRequests(msgspec.Struct, kw_only=True, tag="inspect"):
    """Tell how far every request is, once."""


class EngineReady(msgspec.Struct, kw_only=True, tag="ready"):
    """The first message of an engine: one real step has run."""

    model_name: str
    architecture: str
    vocab_size: int
    hidden_size: int
    """Length of a pooled hidden state."""
    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    memory_plan: dict[str, int]
    """Bytes by purpose: weights, kv_cache, scratch, available."""
    isa: str
    num_threads: int
    load_ms: float
    kv_block_bytes: dict[str, int] = {}
    """Bytes of a KV block over all layers, by data type."""
    settings: dict[str, str | int | float | bool | None] = {}
    """Configuration of cache and scheduler, by the names of its fields."""


class Refusal(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request that was not accepted; nothing of it ran."""

    request_id: str
    message: str
    reason: str
    retry_after_s: float | None = None
    """Seconds until it would be accepted; None: it can never be (a 400)."""
    param: str | None = None
    code: str | None = None


class EngineStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Gauges and counters after a step; counters only grow."""

    num_running: int = 0
    num_waiting: int = 0
    num_background_running: int = 0
    """Part of num_running that yields to interactive requests."""
    num_background_waiting: int = 0
    num_waiting_tokens: int = 0
    num_blocks_total: int = 0
    num_blocks_free: int = 0
    num_blocks_cached: int = 0
    """Unreferenced blocks that still hold a reusable prefix (evictable)."""
    num_blocks_held: int = 0
    kv_wasted_fraction: float = 0.0
    """(reserved - used) tokens / reserved tokens of running requests."""
    num_preemptions: int = 0
    num_preempted_tokens: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    num_rejected: dict[str, int] = {}
    num_cancelled: int = 0
    num_interrupted_steps: int = 0
    """Steps of offline work that ended early for a newcomer."""
    num_finished: dict[str, int] = {}
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_drafts: int = 0
    """Rows that computed guessed tokens."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Guessed tokens that were right."""
    num_steps: int = 0
    step_ms: dict[str, float] = {}
    """Cumulative milliseconds by part: schedule, prepare, forward, sample, update, publish."""
    cpu_ms: dict[str, float] = {}
    """Cumulative processor time: of the whole process (engine), of forward passes (kernels)."""
    predicted_ttft_ms: float = 0.0
    """For a request that would arrive now."""
    step_costs: StepCosts = StepCosts()
    """What the engine has learnt of its machine."""


class RequestProgress(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Where a request is."""

    request_id: str
    is_running: bool
    """Holds a row and blocks; else it waits, perhaps for the second time."""
    num_computed_tokens: int = 0
    num_preemptions: int = 0


class StepResult(msgspec.Struct, kw_only=True, tag="step", omit_defaults=True):
    """All that one step has to tell, in one message."""

    accepted: list[str] = []
    """Requests that admission let in; each will end in exactly one terminal output."""
    outputs: list[RequestOutput] = []
    refusals: list[Refusal] = []
    stats: EngineStats | None = None
    progress: list[RequestProgress] | None = None
    """Of all requests; the answer to InspectRequests."""


class EngineFailed(msgspec.Struct, kw_only=True, tag="failed"):
    """The engine could not start, or a step failed as a whole; the process exits after this."""

    message: str


ToEngine = EngineRequest | AbortRequests | InspectRequests | Drain | Shutdown | DebugFault
FromEngine = EngineReady | StepResult | EngineFailed
