"""Claims on work: what one thread does, others wait for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fibc.backends.once import Once


def test_a_claim_gets_what_is_free_and_leaves_what_another_holds() -> None:
    once = Once()
    with once.claim({"a", "b"}) as mine, ThreadPoolExecutor(1) as other:
        assert mine == {"a", "b"}

        def claim() -> frozenset[str]:
            with once.claim({"b", "c"}) as found:
                return found

        assert other.submit(claim).result(timeout=20) == {"c"}


def test_a_claim_on_what_is_held_waits_for_its_end_also_where_that_is_an_error() -> None:
    once, held, asked = Once(), threading.Event(), threading.Event()

    def hold() -> None:
        with pytest.raises(ValueError, match="boom"), once.claim({"a"}):
            held.set()
            assert asked.wait(20)
            raise ValueError("boom")

    with ThreadPoolExecutor(1) as other:
        ended = other.submit(hold)
        assert held.wait(20)
        asked.set()
        with once.claim({"a"}) as mine:
            assert mine == {"a"}
        ended.result(timeout=20)
