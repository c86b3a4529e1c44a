"""What runs inside the sandbox's process. Standard library only; nothing of rlhpc is imported here."""
