"""How fast it is, as ratios to bare loops in one run: `python -m benchmarks [--quick] [--only NAME …] [--json PATH]`.

Times are shown, never asserted: a machine is as fast as its neighbours let it be. What is asserted is counted
(`wire.py`, `reads.py`, and the tests that use them).
"""
