"""Launch: the plan of a job, its submission through submitit, re-attachment, job states and signals."""
