"""Names in a bundle. The layout is a public format, described in docs/reference/run-folder.md."""

from __future__ import annotations

from rlhpc.jobs.paths import CONFIG as CONFIG

#: Version of the layout and of `bundle.json`.
FORMAT = 1
METADATA, README, RECORD, CHECKSUMS = "ro-crate-metadata.json", "README.md", "bundle.json", "checksums.sha256"
#: Configuration of the SFT run that precedes the run.
SFT_CONFIG = "sft.yaml"
PACKAGES = "environment/packages.txt"
CODE, INPUTS, RUN, WORKFLOW = "code", "inputs", "run", "workflow"
TOP_FOLDERS = ("environment", CODE, INPUTS, RUN, WORKFLOW)
#: Folder of the runs in the configurations of a bundle.
RUNS = "runs"
