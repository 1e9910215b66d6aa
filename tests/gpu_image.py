"""Compiles the toy kernels for the GPU of this machine: with nvcc where there is one, else with torch's NVRTC."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import toys


def compile_toys(directory: Path, arch: str) -> bytes:
    """Return ``toys.cu`` as a cubin.

    Args:
        arch: ``sm_90``.

    Raises:
        RuntimeError: If it does not compile, or nothing here compiles it.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return _compile_with_nvrtc(toys.CUDA_SOURCE.read_bytes(), arch)
    target = directory / "toys.cubin"
    subprocess.run([nvcc, f"-arch={arch}", "-cubin", "-o", target, toys.CUDA_SOURCE], check=True)
    return target.read_bytes()


def _compile_with_nvrtc(source: bytes, arch: str) -> bytes:
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"toys.cu", 0, None, None)
    options = (ctypes.c_char_p * 2)(f"--gpu-architecture={arch}".encode(), b"--std=c++17")
    if nvrtc.nvrtcCompileProgram(program, len(options), options) != 0:
        raise RuntimeError(f"toys.cu: {_text(nvrtc, program, 'ProgramLog')}")
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, image)
    return image.raw


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text.value.decode()


def _nvrtc() -> ctypes.CDLL:
    import torch

    for version in ("13", "12"):
        packages = Path(torch.__file__).parents[1] / "nvidia"
        for path in (f"libnvrtc.so.{version}", *map(str, packages.rglob(f"libnvrtc.so.{version}"))):
            try:
                return ctypes.CDLL(path)
            except OSError:
                continue
    raise RuntimeError("needs nvcc, or the NVRTC of a torch for CUDA")
