"""Model families by GGUF architecture name, imported when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from caudal.config import ModelConfig
from caudal.errors import UnsupportedModelError

if TYPE_CHECKING:
    from caudal.models.llama import LlamaForCausalLM
    from caudal.weights.loader import WeightLoader

ARCHITECTURES = {
    "llama": "llama:LlamaForCausalLM",
    "qwen2": "qwen2:Qwen2ForCausalLM",
    "qwen3": "qwen3:Qwen3ForCausalLM",
}


def create_model(config: ModelConfig, loader: WeightLoader) -> LlamaForCausalLM:
    """Build the model that `config.architecture` names and pack its weights.

    Raises UnsupportedModelError, with the known names, for any other architecture.
    """
    try:
        module_name, class_name = ARCHITECTURES[config.architecture].split(":")
    except KeyError:
        raise UnsupportedModelError(
            f"general.architecture: {config.architecture!r} is not supported; "
            f"known: {', '.join(ARCHITECTURES)}"
        ) from None
    family = getattr(import_module(f"caudal.models.{module_name}"), class_name)
    return cast("LlamaForCausalLM", family(config, loader))
