"""What a sanitizer found of a finalist."""

from __future__ import annotations

from dataclasses import dataclass

from fibc.schema.evaluation import Status


@dataclass(frozen=True)
class Sanitized:
    """One binary, run once under each tool.

    Attributes:
        artifact: Digest of its object code.
        candidate: Digest of the candidate that it was run for.
        point: ``str`` of the sizes.
        sanitizer: Name and version.
        tools: Those that it was run under; after a finding no more were.
        status: PASSED, or what the last tool ended with.
        log: The tail of what that one said; empty where it passed.
    """

    artifact: str
    candidate: str
    point: str
    sanitizer: str
    tools: tuple[str, ...]
    status: Status
    log: str
