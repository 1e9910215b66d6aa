"""Whether races of a proof may go on: an acceptance is worth nothing without the time to show it again."""

from __future__ import annotations

from fibc.shop import Shop
from fibc.sustain import CHECK_S, CHECKS_A_RACE, has_power_cap

RECONFIRM_SHARE = 0.5
"""A reconfirm session's time as a part of a confirm session's: one candidate a key in place of up to four, but the same
process start (confirm 5.4 s of timing in a session, reconfirm 2.0 s, each with 2 to 3 s of starting, gemm bf16)."""

PUBLISH_S = 10.0
"""A module's build on two cores; 6.8 s on an Intel Xeon (Emerald Rapids), g++ 12.2, 2026-11-30."""


class Pace:
    """Ends races while there is time left for what an acceptance is worth nothing without: the reconfirm."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._longest_s = 0.0
        self.begins()

    def begins(self) -> None:
        """The first session begins."""
        self._began = self._at_work_s()

    def _at_work_s(self) -> float:
        """Return the seconds of the run without starts of several processes at once, which are counted apart."""
        return self._shop.budget.elapsed() - self._shop.evaluator.started_s

    def ended(self, text: str) -> None:
        """A session has ended; the first ones, with every key's finalists, are the longest."""
        now = self._at_work_s()
        self._longest_s = max(self._longest_s, now - self._began)
        self._began = now
        self._shop.progress.step(text)

    def fits(self, num_sessions: int, num_races: int = 0) -> bool:
        """Whether so many more sessions, each a part of the longest one, their starts, checks of winners and the build
        fit."""
        on_gpu = has_power_cap(self._shop.task.environment)
        checks_s = num_races * CHECKS_A_RACE * CHECK_S if on_gpu else 0.0
        sessions_s = num_sessions * RECONFIRM_SHARE * self._longest_s + self._shop.evaluator.starting_s(num_sessions)
        return self._shop.budget.fits(sessions_s + checks_s + PUBLISH_S)

    def leaves_enough(self, num_sessions: int, num_races: int = 0) -> bool:
        """Whether races may go on after ``num_sessions``: the reconfirm still fits behind another session.

        The first look is always waited for while there is any time: less than that decides nothing.
        """
        policy = self._shop.task.policy
        if num_sessions < policy.looks[0]:
            return self._shop.time_to_start()
        return self.fits(policy.fixed_sessions + 1, num_races)
