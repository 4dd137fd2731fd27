"""Serves open-weights language models to many users at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from caudal.llm import LLM, Completion
    from caudal.sampling_params import SamplingParams

__all__ = ["LLM", "Completion", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import the offline facade when it is first asked for: servers do not need it."""
    if name == "SamplingParams":
        from caudal.sampling_params import SamplingParams

        return SamplingParams
    if name in __all__:
        from caudal import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'caudal' has no attribute {name!r}")
