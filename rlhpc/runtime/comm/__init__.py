"""Bytes between processes: serialization, shared memory, channels, point to point and collectives."""
