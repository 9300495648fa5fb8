"""What a text must satisfy before it is stored, and how stored text is shown.

Text in an entry was written by somebody: it is data. It is never executed, templated or trusted,
and whoever shows it shows it as a quotation.
"""

import re
import unicodedata
from typing import Any

from specpilot.errors import InvalidInput

__all__ = ["INSTRUCTION_LIKE", "check_strings", "index_terms", "indexable", "quoted"]

_COMPOUND = re.compile(r"[a-z0-9]+(?:[._\-/][a-z0-9]+)*")
_PARTS = re.compile(r"[a-z0-9]+")

INSTRUCTION_LIKE = re.compile(
    r"\b(?:ignore|disregard|override|bypass|forget)\b.{0,40}\b(?:controller|instruction|previous|"
    r"above|rule|check|audit|system prompt|token forcing)|\byou (?:must|should) now\b|"
    r"<\s*/?\s*(?:system|tool|instruction)",
    re.IGNORECASE | re.DOTALL,
)
"""Phrases that address a reader instead of stating a fact. A match is flagged, never obeyed."""


def check_strings(value: Any, where: str = "entry") -> None:
    """Refuse lone surrogates and control characters anywhere in a JSON-like value.

    Raises InvalidInput with the path of the first bad string.
    """
    if isinstance(value, str):
        for character in value:
            category = unicodedata.category(character)
            if category == "Cs":
                raise InvalidInput(
                    f"{where} holds the lone surrogate U+{ord(character):04X}.",
                    hint="Send text that is valid Unicode.",
                )
            if category == "Cc" and character not in "\n\t":
                raise InvalidInput(
                    f"{where} holds the control character U+{ord(character):04X}.",
                    hint="Only line feeds and tabs are accepted.",
                )
    elif isinstance(value, dict):
        for key, inner in value.items():
            check_strings(key, f"a key of {where}")
            check_strings(inner, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for position, inner in enumerate(value):
            check_strings(inner, f"{where}[{position}]")


def index_terms(text: str) -> list[str]:
    """Split text into search terms; ``sm_120`` and ``qwen3.8-27b`` also stay whole.

    A compound keeps its parts beside it, joined by underscores, so that the index's tokenizer
    (underscore is a token character) sees ``qwen3_8_27b qwen3 8 27b``.
    """
    terms: list[str] = []
    for match in _COMPOUND.finditer(unicodedata.normalize("NFKC", text).lower()):
        parts = _PARTS.findall(match.group())
        if len(parts) > 1:
            terms.append("_".join(parts))
        terms.extend(parts)
    return terms


def indexable(text: str) -> str:
    """Return the text as the full-text index stores it."""
    return " ".join(index_terms(text))


def quoted(text: str) -> str:
    """Render stored text as a quotation, one ``> `` a line, so that it cannot pose as ours."""
    return "\n".join(f"> {line}" for line in text.splitlines() or [""])
