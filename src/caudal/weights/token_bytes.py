"""The byte-to-character map of byte-level BPE, and tokens as raw bytes."""

from __future__ import annotations

from functools import cache
from string import hexdigits

from caudal.weights.token_vocabulary import BYTE, NORMAL

SPM_SPACE = "\u2581"
"""SentencePiece writes a space as LOWER ONE EIGHTH BLOCK."""


@cache
def byte_characters() -> tuple[str, ...]:
    """The printable character that stands for each byte value 0–255.

    Source: GPT-2's `bytes_to_unicode`; printable Latin-1 stands for itself, the others are
    numbered from U+0100 in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters = []
    num_moved = 0
    for value in range(256):
        if value in printable:
            characters.append(chr(value))
        else:
            characters.append(chr(0x100 + num_moved))
            num_moved += 1
    return tuple(characters)


@cache
def _to_latin1() -> dict[int, int]:
    """Maps those characters to the Latin-1 character of the byte, any other to itself."""
    return {ord(character): value for value, character in enumerate(byte_characters())}


def bytes_of_byte_level(token: str) -> bytes:
    """Raw bytes of a byte-level BPE token; text outside the map (an added token) is UTF-8."""
    table = _to_latin1()
    if not all(ord(character) in table for character in token):
        return token.encode("utf-8", "replace")
    return token.translate(table).encode("latin-1")


def bytes_of_sentencepiece(token: str) -> bytes:
    """Raw bytes of a SentencePiece piece: its text with the marker turned back into a space."""
    return token.replace(SPM_SPACE, " ").encode("utf-8", "replace")


def byte_token_value(token: str) -> int | None:
    """The value of a byte-fallback token `<0xNN>`, None if the text has another form."""
    digits = token[3:-1]
    if token != f"<0x{digits}>" or len(digits) != 2 or not set(digits) <= set(hexdigits):
        return None
    return int(digits, 16)


def raw_token_bytes(token: str, token_type: int, *, is_byte_level: bool) -> bytes:
    """The bytes that a token of a vocabulary stands for; of a special one its text in UTF-8."""
    if token_type == BYTE and (value := byte_token_value(token)) is not None:
        return bytes([value])
    if token_type != NORMAL:
        return token.encode("utf-8", "replace")
    return bytes_of_byte_level(token) if is_byte_level else bytes_of_sentencepiece(token)
