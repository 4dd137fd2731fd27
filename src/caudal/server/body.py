"""Request bodies: bytes to a validated struct, every fault an error that names the field."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from caudal.errors import InvalidRequestError
from caudal.server.protocol.unsupported import WITHOUT_EFFECT, Neutral, is_neutral

T = TypeVar("T", bound=msgspec.Struct)

logger = logging.getLogger("caudal.server")

_PATH = re.compile(r" - at `(?:key` in `)?\$\.?(.*)`$")
_INDICES = re.compile(r"(?:\[[^\]]*\])+$")
_MISSING = re.compile(r"missing required field `(\w+)`")
_MAX_NAMES_LOGGED = 256


class UnknownFieldLog:
    """Logs each unknown field name once; bounded, so that clients cannot grow it."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, names: set[str]) -> None:
        """Log the names that are new."""
        new = {name[:64] for name in names} - self._seen
        for name in sorted(new)[: _MAX_NAMES_LOGGED - len(self._seen)]:
            self._seen.add(name)
            logger.warning("request field %r is unknown and ignored", name)


class BodyDecoder(Generic[T]):
    """Decodes one kind of body. Of duplicate keys each is checked and the last one counts."""

    def __init__(
        self, body_type: type[T], unsupported: Mapping[str, Neutral] | None = None
    ) -> None:
        self.body_type = body_type
        self._decode: Callable[[bytes], T] = msgspec.json.Decoder(body_type).decode
        self._fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
        self._known = frozenset(field.encode_name for field in msgspec.structs.fields(body_type))
        self._unsupported = unsupported or {}

    def decode(self, body: bytes, unknown: UnknownFieldLog) -> T:
        """The validated struct. Raises InvalidRequestError naming the field and its limit."""
        try:
            str(body, "utf-8")
            fields = self._fields(body)
            extra = fields.keys() - self._known
            if extra:
                self._check_extra(extra, fields, unknown)
            return self._decode_struct(body)
        except UnicodeDecodeError:
            raise InvalidRequestError(
                "The request body is not valid UTF-8.", code="invalid_json"
            ) from None
        except RecursionError:
            raise InvalidRequestError(
                "The request body is nested too deeply.", code="invalid_json"
            ) from None
        except msgspec.ValidationError as error:
            raise invalid_field(error) from None
        except msgspec.DecodeError as error:
            raise InvalidRequestError(
                f"The request body is not valid JSON: {error}.", code="invalid_json"
            ) from None

    def _decode_struct(self, body: bytes) -> T:
        try:
            return self._decode(body)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
            # Some clients write 16 as 16.0, which JSON Schema counts as an integer too.
            value = _integers(msgspec.json.decode(body))
            return msgspec.convert(value, self.body_type)

    def _check_extra(
        self, extra: set[str], fields: dict[str, msgspec.Raw], unknown: UnknownFieldLog
    ) -> None:
        strangers = extra - self._unsupported.keys() - WITHOUT_EFFECT
        for name in extra & self._unsupported.keys():
            value = msgspec.json.decode(fields[name])
            if not is_neutral(value, self._unsupported[name]):
                raise InvalidRequestError(
                    f"{name}: not supported by this server.", param=name, code="unsupported"
                )
        if strangers:
            unknown.note(strangers)


def _integers(value: Any) -> Any:
    """`value` with the whole floats at its top level (and in its lists) as integers."""
    if isinstance(value, dict):
        return {key: _integer(item) for key, item in value.items()}
    return value


def _integer(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_integer(item) for item in value]
    return value


def invalid_field(error: msgspec.ValidationError) -> InvalidRequestError:
    """What msgspec found wrong, as an error that names the field."""
    text = str(error)
    path = _PATH.search(text)
    where = path.group(1) if path else ""
    reason = text[: path.start()] if path else text
    missing = _MISSING.search(reason)
    if missing:
        where = f"{where}.{missing.group(1)}".lstrip(".")
        reason = "this field is required"
    if not where:
        return InvalidRequestError(f"The request body is malformed: {reason}.", code="invalid_body")
    reason = reason.replace(" | null", "").replace("Expected", "expected", 1)
    param = _INDICES.sub("", where)
    return InvalidRequestError(f"{where}: {reason}.", param=param, code="invalid_value")
