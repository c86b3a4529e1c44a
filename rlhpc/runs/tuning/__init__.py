"""Placement tuning (`rlhpc tune`): measures short real runs, and searches for the placement with the shortest step.

workload: phases of a step, from the task type · calibrate: short runs · costs: measured costs · shapes: machines and
placements · queueing_model: predicted step time · search: best placement and settings · tune: the command.
"""
