"""Compare samplers on recorded evaluations: how far behind the best config each would be after so many trials.

    python benchmarks/replay_samplers.py tests/data/recorded_gemm.json --trials 48 --seeds 50

Nothing is built or timed, and equal arguments print equal numbers.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from fibc.search.replay import POLICIES, Recording, load, mean_regret

CHECKPOINTS = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def main() -> None:
    """Parse the command line and print a table per recording."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="+", type=Path, help="files of fibc.search.replay.save")
    parser.add_argument("--trials", type=int, default=48)
    parser.add_argument("--seeds", type=int, default=50)
    arguments = parser.parse_args()
    for path in arguments.recordings:
        print_regret(path.name, load(path), arguments.trials, arguments.seeds)


def print_regret(name: str, recording: Recording, trials: int, num_seeds: int) -> None:
    """Print the mean regret of every policy, in percent of speed."""
    num_failed = sum(value is None for value in recording.values.values())
    print(f"{name}: {recording.about}")
    print(
        f"{len(recording.values)} configs, {num_failed} failed, best {math.exp(recording.best):.3f} of native's speed"
    )
    columns = [count for count in CHECKPOINTS if count < trials] + [trials]
    print("percent behind the best after".ljust(30) + "".join(f"{count:>8}" for count in columns))
    for policy in POLICIES:
        curve = mean_regret(recording, policy, trials=trials, num_seeds=1 if policy == "grid" else num_seeds)
        print(policy.ljust(30) + "".join(f"{100 * curve[count - 1]:8.2f}" for count in columns))
    print()


if __name__ == "__main__":
    main()
