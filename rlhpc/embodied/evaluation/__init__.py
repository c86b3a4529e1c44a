"""Evaluation, recording and intervention: episodes of a trained policy."""
