"""The sizes at which serving engines capture graphs."""

from __future__ import annotations

CAPTURE_SIZES: tuple[int, ...] = (1, 2, 4, *range(8, 257, 8))
"""Batch sizes, in tokens, at which vLLM and SGLang capture CUDA graphs by default: calls are padded up to them, so
these sizes carry more decode traffic than their neighbours. They become points of a cell, never edges."""
