"""fibc: a compiler for dispatch decisions, from an operator's contract and its workloads to a native table."""

from __future__ import annotations
