"""Who asks, and for which page: what the endpoints read off a request besides its body."""

from __future__ import annotations

from typing import TypeVar
from urllib.parse import parse_qsl

import msgspec

from caudal.errors import InvalidRequestError
from caudal.server.auth import OWNER
from caudal.server.body import invalid_field
from caudal.server.exchange import Exchange

T = TypeVar("T", bound=msgspec.Struct)

MAX_QUERY_BYTES = 8192


def owner_of(exchange: Exchange) -> str:
    """Names the holder of the API key; files and batches of one are invisible to others.

    A server without keys has a single owner, whatever key its clients happen to send.
    """
    owner: str = exchange.scope.get(OWNER, "")
    return owner


def read_query(exchange: Exchange, query_type: type[T]) -> T:
    """The query parameters, checked. Raises InvalidRequestError naming the bad one."""
    query: bytes = exchange.scope.get("query_string", b"")
    if len(query) > MAX_QUERY_BYTES:
        raise InvalidRequestError(
            f"The query is longer than {MAX_QUERY_BYTES} bytes.", code="invalid_query"
        )
    parameters = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    try:
        return msgspec.convert(parameters, query_type, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None
