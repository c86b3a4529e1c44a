"""What is outside a job: its plan, submission through submitit, attaching again, states, waiting, and the doctor."""
