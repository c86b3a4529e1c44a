"""Everything around a job: planning, submitting through submitit, re-attaching, states, waiting, and the doctor."""
