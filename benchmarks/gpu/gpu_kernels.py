"""The Triton kernel that only reads: the ceiling of everything that streams a weight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_words"])
def _read(data, out, num_words, BLOCK: tl.constexpr):  # noqa: N803
    first = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    step = tl.num_programs(0) * BLOCK
    seen = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_words, step):
        place = start + first
        seen ^= tl.load(data + place, mask=place < num_words, other=0, eviction_policy="evict_first")
    tl.store(out + tl.program_id(0), tl.xor_sum(seen, 0))


def read(*inputs: torch.Tensor, block: int, num_warps: int, programs_per_sm: int) -> torch.Tensor:
    """Read the last input; return one number per program.

    Args:
        block: Words of 4 bytes that a program reads at once.
        programs_per_sm: Programs for each multiprocessor; 0 gives every block one of its own.
    """
    words = inputs[-1].view(torch.int32)
    num_words = words.numel()
    num_blocks = triton.cdiv(num_words, block)
    num_sms = torch.cuda.get_device_properties(words.device).multi_processor_count
    programs = min(num_blocks, num_sms * programs_per_sm) if programs_per_sm else num_blocks
    out = torch.empty(programs, dtype=torch.int32, device=words.device)
    _read[(programs,)](words, out, num_words, BLOCK=block, num_warps=num_warps)
    return out
