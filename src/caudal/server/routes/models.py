"""`GET /v1/models`."""

from __future__ import annotations

from datetime import UTC, datetime

from caudal.server.endpoint import ApiRoute, path_parameter
from caudal.server.exchange import Exchange
from caudal.server.model import ServedModel
from caudal.server.protocol.models import ModelCard, ModelList, ModelMetadata
from caudal.server.state import AppState


async def list_models(state: AppState, exchange: Exchange) -> None:
    """The model that is served."""
    card = _card(state, state.require_model())
    await exchange.respond_json(ModelList("list", [card], False, card.id, card.id))


async def get_model(state: AppState, exchange: Exchange) -> None:
    """One model by name."""
    model = state.require_model(path_parameter(exchange.scope, "model_id"))
    await exchange.respond_json(_card(state, model))


def _card(state: AppState, model: ServedModel) -> ModelCard:
    return ModelCard(
        id=model.name,
        object="model",
        created=model.created,
        owned_by="caudal",
        root=model.name,
        parent=None,
        max_model_len=state.engine.info.max_model_len,
        type="model",
        display_name=model.name,
        created_at=datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        metadata=ModelMetadata(
            architecture=model.architecture,
            quantization=model.quantization,
            vocab_size=model.tokenizer.vocab_size,
            has_chat_template=model.chat_template.has_template,
            warnings=model.warnings,
        ),
    )


ROUTES = (
    ApiRoute("GET", "/v1/models", list_models, "The served model", ModelList, errors=(503,)),
    ApiRoute(
        "GET",
        "/v1/models/{model_id:path}",
        get_model,
        "One model by name",
        ModelCard,
        errors=(404, 503),
    ),
)
