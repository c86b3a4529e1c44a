"""Numbers of RLinf's own code, to compare rlhpc's with them."""
