"""Baseline of behaviour: finished runs of every task type, and lists of public names, as an earlier commit made them.

`runs` has the configurations of the runs, `archive` packs and unpacks their folders, `exercise` evaluates, exports, resumes
and reports one, `compare` compares the result with the recorded one, and `lists` collects public names from sources and pages.

    python -m tests.baseline make [NAME …]      trains the runs anew, packs their folders, and records what they do
    python -m tests.baseline record [NAME …]    records anew what the packed runs do
    python -m tests.baseline lists              writes the lists of public names anew
"""
