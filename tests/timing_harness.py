"""What a harness has beside the timing of calls, for those of tests that bind no kernel."""

from __future__ import annotations

from typing import Any


class TimingHarness:
    """See ``fibc.timing.Harness``; a subclass times calls."""

    def bind(self, library_path: str, symbol: str, spec: bytes, device: str = "cpu") -> Any:
        raise NotImplementedError

    def set_num_threads(self, num_threads: int) -> None:
        raise NotImplementedError

    def fill_allocations(self, fills: bool) -> None:
        raise NotImplementedError
