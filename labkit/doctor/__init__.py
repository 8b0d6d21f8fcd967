"""`labkit doctor`: what is wrong with this machine's set-up, each problem with its remedy.

Limits: nothing is changed or downloaded. Only this Python's environment is checked: Jupyter may
run in another one.
"""

from collections.abc import Callable, Iterable

from labkit.doctor.machine import (
    check_compiler,
    check_deepspeed,
    check_disk,
    check_memory,
    check_small_model,
)
from labkit.doctor.packages import Finding, Imports, check_packages, check_python


def examine() -> list[Finding]:
    """Check everything. A check that fails itself is a problem, never an exception."""
    imports = Imports()  # in a process that works while the checks without PyTorch run
    checks = [check_python, check_packages, check_disk, check_small_model, imports.check]
    findings = [finding for check in checks for finding in _guarded(check)]
    if imports.torch_works:  # otherwise importing it might end this process
        from labkit.doctor.gpu import check_gpu

        for check in (check_memory, check_compiler, check_deepspeed, check_gpu):
            findings += _guarded(check)
    return findings


def _guarded(check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except Exception as error:  # a broken installation may raise anything: the other checks go on
        subject = check.__name__.removeprefix("check_").replace("_", " ")
        text = f"could not be checked: {type(error).__name__}: {error}"
        remedy = "install the packages again, as the README says; if this stays, please report it"
        return [Finding("problem", subject, text, remedy)]


def as_text(findings: Iterable[Finding]) -> str:
    """Return a line for each finding, problems last, and one for each remedy.

    Lines are not wrapped, so that a command can be pasted.
    """
    order = ("ok", "note", "problem")
    ordered = sorted(findings, key=lambda finding: order.index(finding.status))
    width = max(len(finding.subject) for finding in ordered)
    lines = []
    for finding in ordered:
        lines.append(f"{finding.status:<8} {finding.subject:<{width}}  {finding.text}")
        if finding.remedy:
            lines.append(f"{'':8} {'':{width}}  -> {finding.remedy}")
    problems = sum(finding.status == "problem" for finding in ordered)
    lines.append(f"Problems: {problems}." if problems else "All is well.")
    return "\n".join(lines)
