"""Figures of an accelerator: `python -m bench.gpu`."""
