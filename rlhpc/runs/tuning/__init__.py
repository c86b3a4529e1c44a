"""`rlhpc tune`: measures short real runs, and searches the placement with the shortest step.

workload: what a step consists of, as a kind of run says · costs: what was measured · shape: machines, and places on them ·
model: how long a step takes somewhere · search: the best of all places and settings · measure: the short runs · plan: all of
it.
"""
