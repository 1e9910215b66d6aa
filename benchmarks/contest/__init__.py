"""The contest of pickers that benchmarks/referee.py holds: who picks what, what it claims, and what a referee sees."""
