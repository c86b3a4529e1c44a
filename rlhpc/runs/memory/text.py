"""The account as `rlhpc plan` prints it."""

from __future__ import annotations

from collections.abc import Sequence

from rlhpc.runs.memory.account import GIB, MIB, Account, Term, gib
from rlhpc.runs.memory.plan import MemoryPlan, Place

_NAME = 38


def render_memory(plan: MemoryPlan, *, measure: bool = False) -> str:
    """The accounts of all groups, and the places where they are.

    Args:
        plan: The accounts.
        measure: Also has PyTorch follow a step of those who train.
    """
    if not plan.accounts:
        return ""
    lines = ["memory"]
    for account in plan.accounts:
        lines += _of_group(account, accelerated=plan.accelerated[account.group], room=plan.left[account.group])
        if measure and account.measured is not None:
            lines.append(f"    {account.measured()}")
    lines += ["", *(f"  {_of_place(place)}" for place in plan.places)]
    refused = plan.refusals()
    if refused:
        lines += ["", "does not fit; rlhpc submit, run and train refuse it (cluster.memory_check):"]
        lines += [f"  {words}" for words in refused]
    for doubt in plan.doubts():
        lines += ["", "may not fit:", f"  {doubt}"]
    if any(place.room is None and "accelerator" in place.name for place in plan.places):
        lines += [
            "",
            "  nobody says how much memory an accelerator has: set cluster.accelerator_memory, such as 80G, best in the site "
            "file",
        ]
    return "\n".join(lines)


def _of_group(account: Account, *, accelerated: bool, room: float | None) -> list[str]:
    if account.unknown:
        return ["", f"  {account.group}: not known: {account.unknown}"]
    lines = ["", f"  {account.group}: {account.about}" if account.about else f"  {account.group}"]
    where = "on its accelerator" if accelerated else "of its node"
    unit = GIB if max((moment.nbytes for moment in account.moments), default=0.0) >= GIB else MIB
    where += ", GiB" if unit == GIB else ", MiB"
    lines.append(
        f"    {'a rank holds ' + where:<{_NAME}}" + "".join(f"  {m.name:>{_wide(m.name)}}" for m in account.moments)
    )
    for name in dict.fromkeys(term.name for moment in account.moments for term in moment.terms):
        cells = []
        for moment in account.moments:
            found = [term.nbytes for term in moment.terms if term.name == name]
            cells.append(f"  {_number(sum(found) / unit) if found else '':>{_wide(moment.name)}}")
        lines.append(f"      {name:<{_NAME - 2}}" + "".join(cells))
    lines.append(
        f"    {'together':<{_NAME}}"
        + "".join(f"  {_number(m.nbytes / unit):>{_wide(m.name)}}" for m in account.moments)
    )
    if (peak := account.peak) is not None:
        lines.append(
            f"    most: {peak.name}, {gib(peak.nbytes)}; largest term: {peak.largest.name}, {gib(peak.largest.nbytes)}"
        )
    for what, terms in (
        ("host memory of a rank", account.host),
        ("pinned host memory of a rank", account.pinned),
        ("host memory of a rank, if there is room", account.spare),
        ("/dev/shm of a node", account.shared),
    ):
        if terms:
            lines.append(f"    {what}: {_listed(terms)}")
    lines += [f"    {remark}" for remark in account.remarks]
    if room is not None and room > 0:
        lines += [f"    fits up to: {key}={value}" for key, value in account.most(room).items()]
    return lines


def _wide(name: str) -> int:
    return max(7, len(name))


def _number(size: float) -> str:
    return f"{size:.2f}" if size < 10 else f"{size:.1f}"


def _listed(terms: Sequence[Term]) -> str:
    return ", ".join(f"{term.name} {gib(term.nbytes)}" for term in terms)


def _of_place(place: Place) -> str:
    always = [f"{name} {gib(n)}" for name, n in place.held.items() if name not in place.turns]
    turns = [f"{name} {gib(n)}" for name, n in place.held.items() if name in place.turns]
    held = " + ".join([*always, *([f"{' or '.join(turns)} (in turns)"] if len(turns) > 1 else turns)])
    if place.room is None:
        return f"{place.name}: {held} = {gib(place.nbytes)}"
    verdict = "fits" if place.fits else "does not fit" if place.refused else "may not fit"
    return f"{place.name}: {held} = {gib(place.nbytes)} of {gib(place.room)} ({place.said}): {verdict}"
