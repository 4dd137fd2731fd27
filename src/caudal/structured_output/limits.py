"""What a schema or grammar may ask for, so that nobody's can hold up a server.

Compiling at these limits takes tens of milliseconds, and the mask of one token at most about ten.
"""

from __future__ import annotations

MAX_TEXT_CHARS = 131_072
"""Of a schema as JSON text, and of a grammar."""
MAX_REGEX_CHARS = 4_096
MAX_SCHEMA_DEPTH = 32
"""Schemas within schemas."""
MAX_SUBSCHEMAS = 5_000
MAX_PROPERTIES = 1_000
"""Of one object."""
MAX_OPTIONAL_PROPERTIES = 256
"""Of one object: any subset of them may follow, so they cost the square of their number."""
MAX_ENUM_VALUES = 5_000
"""In the whole schema."""
MAX_ITEMS = 100_000
"""Largest minItems, maxItems, minLength, maxLength, minProperties, maxProperties."""
MAX_MULTIPLE = 10_000
"""Largest common multiple of all `multipleOf`, in units of their last decimal place."""
MAX_REPEAT = 10_000
"""Largest count in a regular expression's {n,m}."""
MAX_NESTED_REPEAT = 100_000
"""Largest product of such counts around each other."""
MAX_CHOICES = 1_000
MAX_CHOICE_CHARS = 65_536
"""Of all choices together."""
MAX_TAGS = 256

MAX_WHITESPACE = 8
"""Characters between two tokens of JSON."""
MAX_DIGITS = 32
"""Digits in a row in a JSON number, unless nothing else is allowed."""

COMPILE_TIMEOUT_S = 10.0
"""A grammar that is not compiled after this is refused."""
MASK_TIMEOUT_S = 2.0
"""A request whose mask is not computed after this fails."""
MAX_STUCK_MASKS = 4
"""Masks that hang at the same time; each may hold a core, so further ones are not begun."""
