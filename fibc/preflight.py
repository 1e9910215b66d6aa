"""A look at the machine before a night's measurements: room on the disk, other work, and the health of its GPUs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from fibc.nvml import Monitor, NvmlError, names_of, open_monitor
from fibc.observer import BENDING
from fibc.schema.silicon import Gpu
from fibc.schema.upkeep import Finding

MIN_FREE_BYTES = 500 << 20
"""A generation takes about 1 MB and a retuned key's candidates some tens; below this a build may fail halfway."""

MAX_LOAD = 0.5
"""Load per CPU above which other work is likely: said, and left to the A/A gate to judge."""


def check_machine(out: Path) -> tuple[Finding, ...]:
    """Look at the disk below ``out`` and at the load."""
    free = shutil.disk_usage(out).free
    disk = Finding("disk", free >= MIN_FREE_BYTES, f"{free / 1e9:.1f} GB free below {out}")
    load = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    busy = f"{load:.2f} processes at work per CPU over the last minute"
    if load > MAX_LOAD:
        busy += ": other work disturbs timings, and the A/A gate will say whether too much"
    return disk, Finding("load", True, busy)


def check_gpus(gpus: Iterable[Gpu], watch: Callable[[Gpu], Monitor] = open_monitor) -> tuple[Finding, ...]:
    """Look at each GPU: foreign processes, what bends its clock, ECC and XID errors."""
    return tuple(_check_gpu(gpu, watch) for gpu in gpus)


def _check_gpu(gpu: Gpu, watch: Callable[[Gpu], Monitor]) -> Finding:
    name = f"gpu {gpu.ordinal}"
    try:
        monitor = watch(gpu)
        reading, processes = monitor.read(), monitor.processes()
    except (NvmlError, OSError) as error:
        return Finding(name, True, f"{gpu}: not watched: {error}")
    faults = []
    if processes:
        faults.append(f"used by {len(processes)} other processes ({', '.join(map(str, sorted(processes)))})")
    if bent := reading.reasons & BENDING:
        faults.append(f"clock held down: {names_of(bent)}")
    if reading.ecc_errors:
        faults.append(f"{reading.ecc_errors} uncorrected ECC errors since the driver was loaded")
    if reading.xids:
        faults.append(f"XID {', '.join(map(str, reading.xids))}")
    return Finding(name, not faults, f"{gpu}: {'; '.join(faults) or f'free, SM clock {reading.sm_clock_mhz} MHz'}")
