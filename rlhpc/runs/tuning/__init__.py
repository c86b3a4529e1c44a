"""`rlhpc tune`: from short real runs to what a step costs, and from that to where a run's groups should be.

workload: what a step consists of, as a kind of run says · costs: what was measured · shape: machines, and places on them ·
model: how long a step takes somewhere · search: the best of all places and settings · measure: the short runs · plan: all of
it.
"""
