"""A capture that fails leaves no stream capturing, and says what the call said."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fibc.cuda_queue import CudaQueue


class Stream:
    def synchronize(self) -> None:
        pass


class Graph:
    """A graph whose end fails where the capture was invalidated."""

    made: list[Graph]
    invalidated = False

    def __init__(self) -> None:
        self.log: list[str] = []
        Graph.made.append(self)

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.log.append(f"begin {pool} {capture_error_mode}")

    def capture_end(self) -> None:
        self.log.append("end")
        if Graph.invalidated:
            raise RuntimeError("capture invalidated")

    def replay(self) -> None:
        self.log.append("replay")


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> CudaQueue:
    """A queue without a device, on fake graphs."""
    Graph.made, Graph.invalidated = [], False
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    made = CudaQueue.__new__(CudaQueue)
    fields: dict[str, Any] = {"_stream": Stream(), "_pool": "pool"}
    made.__dict__.update(fields)
    return made


def test_a_capture_is_replayed_from_the_shared_pool(queue: CudaQueue) -> None:
    for _ in range(2):
        queue.capture(lambda: None)()
    assert [graph.log for graph in Graph.made] == [["begin pool thread_local", "end", "replay"]] * 2


@pytest.mark.parametrize("invalidated", [False, True])
def test_a_call_that_cannot_be_captured_raises_its_own_error_after_the_capture_ended(
    queue: CudaQueue, invalidated: bool
) -> None:
    Graph.invalidated = invalidated

    def enqueue() -> None:
        raise ValueError("reads the device")

    with pytest.raises(ValueError, match="reads the device"):
        queue.capture(enqueue)
    assert Graph.made[0].log == ["begin pool thread_local", "end"]


def test_a_capture_that_was_invalidated_silently_is_an_error(queue: CudaQueue) -> None:
    Graph.invalidated = True
    with pytest.raises(RuntimeError, match="capture invalidated"):
        queue.capture(lambda: None)
