"""Sandbox of programs that a policy wrote. The files that run inside need the standard library alone."""
