"""Marks can lie, so faults are planted: `python -m faults`.

Each fault is one small break of a rule, made in a copy of this tree. The tests that should notice run against that
copy, and whatever turns red is a witness. A fault without a witness is a hole in the tests, and the run fails.

    fault.py      what a fault is, and how it is planted
    catalogue/    all faults, by what they break
    suites.py     which tests may notice
    trial.py      copy, plant, run, look
    witness.py    the pytest plugin that runs inside the copy and writes down what turned red
    report.py     lines for people, JSON, and docs/faults.md, which tells the next run whom to ask first
"""
