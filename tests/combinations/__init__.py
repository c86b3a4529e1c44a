"""Runs of options in combination, pairwise: what `rlhpc plan` accepts must run, resume and say nothing that is not finite.

    python -m tests.combinations [--kind language|embodied] [--seed S] [--part K/N] [--workers W]

`options` has the options of each kind of run, `array` makes rows in which any two values of two options meet, and `trial` runs
one.
"""
