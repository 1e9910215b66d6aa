"""Digests: the identity of everything that fibc records."""

from __future__ import annotations

import hashlib
import json
from typing import Any

DIGEST_CHARS = 16
"""Hex digits of a digest. 64 bits: a clash among 10^6 objects has a probability of 3e-8."""


def digest_text(*parts: str | bytes) -> str:
    """Return the digest of ``parts``, each prefixed by its length so that joins cannot clash."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(f"{len(data)}:".encode())
        state.update(data)
    return state.hexdigest()[:DIGEST_CHARS]


def digest_json(value: Any) -> str:
    """Return the digest of JSON-able ``value``; the order of a mapping's keys does not matter."""
    return digest_text(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True))
