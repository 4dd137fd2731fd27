"""`caudal pull`: fetch a model, check its header and print where it is."""

from __future__ import annotations

from typing import Annotated

import typer

_Model = Annotated[
    str,
    typer.Argument(
        help="smollm2-135m, a hub id (owner/repo, owner/repo:Q4_K_M, owner/repo/file.gguf) "
        "or a path."
    ),
]
_Verify = Annotated[
    bool,
    typer.Option("--verify", help="Hash the cached file again; fetch it anew if damaged."),
]


def pull(model: _Model, verify: _Verify = False) -> None:
    """Fetch a model into the cache and print its path on standard output."""
    from caudal.weights.download import resolve_model
    from caudal.weights.gguf import GGUFFile
    from caudal.weights.model_config import read_model_config

    path = resolve_model(model, verify=verify)
    with GGUFFile.open(path) as gguf:
        config = read_model_config(gguf)
        num_bytes = sum(tensor.nbytes for tensor in gguf.tensors.values())
    typer.echo(
        f"{config.name}: {config.architecture}, {config.num_layers} layers, "
        f"{num_bytes / 1e6:.1f} MB of weights, context of {config.context_length} tokens",
        err=True,
    )
    typer.echo(path)
