"""Sandbox of programs that a policy wrote. The files that run inside it need only the standard library."""
