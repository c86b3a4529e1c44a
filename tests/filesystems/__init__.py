"""Filesystems with the behaviour of NFS, Lustre and full disks, on which the tests run rlhpc.

`mount.py` is one client of a shared folder: a FUSE filesystem with switchable faults (`faults.py`). `beds.py` mounts several
clients, gives each to a simulated host, and makes small real filesystems. `scenarios.py` has what users do on them, by
`agent.py`, and `python -m tests.filesystems` runs seeded draws of scenarios and faults.
"""
