"""What all kinds of run have in common: the composition root, the loop, the run folder, the report."""
