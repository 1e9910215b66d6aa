"""The child that asks cuBLASLt's heuristic for algorithms, on the GPU.

As a script (``python -S -I fibc/backends/cublaslt_probe.py``) it reads one JSON object from standard input::

    {"driver": "libcuda.so.1", "library": "/.../libcublasLt.so.13", "ordinal": 0, "answer": "/tmp/answer.json",
     "alignment_bytes": 16, "reduction_schemes": 2, "num_results": 8, "limits_bytes": [33554432, 0],
     "problems": [{"m": 16, "n": 4096, "k": 4096, "dtype": "bfloat16", "compute": "f32"}]}

and writes ``{"version": 130002, "answers": [...]}`` to ``answer``: for each problem a list for each limit, best first,
of ``{"algorithm": 128 hexadecimal digits, "workspace_bytes": 0, "waves": 0.9, "config": {"tile": 20, ...}}``. Where
that cannot be, it prints why and exits with 1. It runs in a process of its own: the heuristic needs a context, and a
process that has one can fork no child that uses CUDA.

A problem is C[m, n] = A[m, k] B[n, k]^T, asked as ``fibc/cuda/cublaslt_gemm.h`` asks it.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
"""cudaDataType."""

COMPUTE = {"f32": 68, "tf32": 77}
"""cublasComputeType_t."""

TRANSA = 3
"""cublasLtMatmulDescAttributes_t; the value for a transposed operand is 1."""

MAX_WORKSPACE, REDUCTION_SCHEMES, MIN_ALIGNMENTS = 1, 3, (5, 6, 7, 8)
"""cublasLtMatmulPreferenceAttributes_t."""

CONFIG = {
    "id": 0,
    "tile": 1,
    "split_k": 2,
    "reduction": 3,
    "swizzle": 4,
    "custom": 5,
    "stages": 6,
    "inner_shape": 7,
    "cluster_shape": 8,
}
"""cublasLtMatmulAlgoConfigAttributes_t; what people read of an algorithm."""

NOT_SUPPORTED = 15
"""CUBLAS_STATUS_NOT_SUPPORTED: there is no algorithm."""


class Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


Layout = ctypes.c_uint64 * 8
"""cublasLtMatrixLayoutOpaque_t."""


class LibraryError(Exception):
    """The driver or the library refused; the message names the call and its status."""


def ask(driver: Any, library: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answers to ``request``.

    Args:
        driver: ``libcuda.so.1`` as ctypes loads it.
        library: ``libcublasLt.so`` alike.

    Raises:
        LibraryError: If a call fails.
    """
    _enter_context(driver, request["ordinal"])
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    handle = ctypes.c_void_p()
    _check("cublasLtCreate", library.cublasLtCreate(ctypes.byref(handle)))
    preference = ctypes.c_void_p()
    _check("cublasLtMatmulPreferenceCreate", library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
    _prefer(library, preference, REDUCTION_SCHEMES, ctypes.c_uint32(request["reduction_schemes"]))
    for attribute in MIN_ALIGNMENTS:
        _prefer(library, preference, attribute, ctypes.c_uint32(request["alignment_bytes"]))
    answers: list[list[list[dict[str, Any]]]] = []
    for problem in request["problems"]:
        answers.append([])
        for limit_bytes in request["limits_bytes"]:
            _prefer(library, preference, MAX_WORKSPACE, ctypes.c_uint64(limit_bytes))
            answers[-1].append(_ask_one(library, handle, preference, problem, request["num_results"]))
    return {"version": int(library.cublasLtGetVersion()), "answers": answers}


def _enter_context(driver: Any, ordinal: int) -> None:
    """Make the primary context of the GPU current, the one that torch will use."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check("cuInit", driver.cuInit(0))
    _check("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), ordinal))
    _check("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    _check("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))


def _ask_one(library: Any, handle: Any, preference: Any, problem: dict[str, Any], num: int) -> list[dict[str, Any]]:
    m, n, k = problem["m"], problem["n"], problem["k"]
    operation = ctypes.c_void_p()
    created = library.cublasLtMatmulDescCreate(ctypes.byref(operation), COMPUTE[problem["compute"]], TYPES["float32"])
    _check("cublasLtMatmulDescCreate", created)
    transposed = ctypes.c_int32(1)
    _check(
        "cublasLtMatmulDescSetAttribute",
        library.cublasLtMatmulDescSetAttribute(operation, TRANSA, ctypes.byref(transposed), ctypes.c_size_t(4)),
    )
    dtype = TYPES[problem["dtype"]]
    layouts = [_layout(library, dtype, rows, columns) for rows, columns in ((k, n), (k, m), (n, m), (n, m))]
    results = (Result * num)()
    found = ctypes.c_int()
    status = library.cublasLtMatmulAlgoGetHeuristic(
        handle, operation, *layouts, preference, num, results, ctypes.byref(found)
    )
    library.cublasLtMatmulDescDestroy(operation)
    if status == NOT_SUPPORTED:
        return []
    _check("cublasLtMatmulAlgoGetHeuristic", status)
    return [_plain(library, result) for result in results[: found.value] if result.state == 0]


def _layout(library: Any, dtype: int, rows: int, columns: int) -> ctypes.Array[ctypes.c_uint64]:
    layout = Layout()
    status = library.cublasLtMatrixLayoutInit_internal(
        layout,
        ctypes.c_size_t(ctypes.sizeof(layout)),
        dtype,
        ctypes.c_uint64(rows),
        ctypes.c_uint64(columns),
        ctypes.c_int64(rows),
    )
    _check("cublasLtMatrixLayoutInit_internal", status)
    return layout


def _plain(library: Any, result: Result) -> dict[str, Any]:
    return {
        "algorithm": bytes(result.algorithm).hex(),
        "workspace_bytes": result.workspace_bytes,
        "waves": result.waves,
        "config": {name: _config(library, result, attribute) for name, attribute in CONFIG.items()},
    }


def _config(library: Any, result: Result, attribute: int) -> int:
    """Return an attribute of an algorithm, -1 where it has none."""
    value, written = ctypes.c_uint64(0), ctypes.c_size_t(0)  # of 2 or 4 bytes, little-endian
    for size in (4, 2):
        status = library.cublasLtMatmulAlgoConfigGetAttribute(
            result.algorithm, attribute, ctypes.byref(value), ctypes.c_size_t(size), ctypes.byref(written)
        )
        if status == 0:
            return value.value
    return -1


def _prefer(library: Any, preference: Any, attribute: int, value: Any) -> None:
    status = library.cublasLtMatmulPreferenceSetAttribute(
        preference, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
    )
    _check(f"cublasLtMatmulPreferenceSetAttribute({attribute})", status)


def _check(call: str, status: int) -> None:
    if status != 0:
        raise LibraryError(f"{call}: status {status}")


def main() -> int:
    request = json.load(sys.stdin)
    try:
        answer = ask(ctypes.CDLL(request["driver"]), ctypes.CDLL(request["library"]), request)
    except (LibraryError, OSError, AttributeError) as error:  # AttributeError: a library without one of the functions
        print(error, file=sys.stderr)
        return 1
    Path(request["answer"]).write_text(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
