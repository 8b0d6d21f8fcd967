"""Scripts made to fit, from command to diff: docs/FIT.md.

    .venv-phantom/bin/python benchmarks/fit.py           # run --fix on each, write record and page
    .venv-phantom/bin/python benchmarks/fit.py gpt2_loop.py         # one of them
    .venv-phantom/bin/python benchmarks/fit.py --page    # write the page from the record

The scripts lie in ``benchmarks/examples/fit``; ``fit.json`` has what `--fix` said of each.

Limits: models are at their real size, data are made in the scripts.
"""

import difflib
import json
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpumem.files import TemporaryFolder

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE / "examples" / "fit"
RECORD = HERE / "fit.json"
PAGE = HERE.parent / "docs" / "FIT.md"
#: Sections of the answer that the page leaves out: the diff says the one, nobody needs the other.
LEFT_OUT = ("What to write", "Tried, and not offered")


class Example(NamedTuple):
    """A script, the GPU that it does not fit, and what it trains."""

    file: str
    gpu: str
    title: str


SCRIPTS = (
    Example("gpt2_loop.py", "t4", "GPT-2 in a plain loop"),
    Example("lora_trainer.py", "a100-40gb", "Llama-3.1-8B with LoRA, by Trainer"),
    Example("vit_pictures.py", "rtx-3060", "ViT-B/16 on pictures"),
)
INTRODUCTION = """\
# Scripts made to fit

Each script below lies in [`benchmarks/examples/fit`](../benchmarks/examples/fit) and runs out of
memory. `labkit phantom --fix` runs it on a GPU that is not there, tries
[remedies](PHANTOM.md#what-makes-it-fit), and chooses as few of the mildest as make it fit with 5 %
to spare. "Step's bound" is how much the least time for a step grows that the GPU's peak rates
allow. The diff is what `--fix` says to write; it does not touch the file. A nightly test runs each
script as it is and as the diff makes it, and holds both to these bytes. What `--fix` tried and does
not offer is left out.
"""


def main() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    chosen = sys.argv[1:] or [example.file for example in SCRIPTS]
    for example in SCRIPTS:
        if example.file in chosen:
            record[example.file] = run(example)
    if chosen != ["--page"]:
        RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(record), encoding="utf-8")


def run(example: Example) -> dict[str, Any]:
    """Return what `--fix` says of a script, and the script with what it says to write."""
    from phantom_gpu.fix import fix
    from phantom_gpu.write_edits import written

    with TemporaryFolder() as folder:
        shutil.copy(EXAMPLES / example.file, folder)
        found = fix(
            [sys.executable, example.file],
            gpu=example.gpu,
            cwd=folder,
            stdout=sys.stderr,
            report=lambda sentence: print(sentence, file=sys.stderr),
        )
        print(found, file=sys.stderr)
        assert found.chosen
        assert found.last
        # The script's own lines are read there.
        sections = [each for each in found.sections() if each.title not in LEFT_OUT]
    return {
        "answer": "\n\n".join([found.headline(), *map(str, sections)]),
        "remedies": [offer.name for offer in found.chosen.remedies],
        "written": written(source(example), found.chosen.remedies),
        "reserved_bytes": found.last.peak_reserved_bytes,
    }


def source(example: Example) -> str:
    return (EXAMPLES / example.file).read_text(encoding="utf-8")


def shown(record: dict[str, dict[str, Any]]) -> list[Example]:
    """Return the scripts of which there is a record."""
    return [example for example in SCRIPTS if example.file in record]


def page(record: dict[str, dict[str, Any]]) -> str:
    """Return the text of docs/FIT.md."""
    parts = [INTRODUCTION]
    for example in shown(record):
        found = record[example.file]
        before, after = (text.splitlines() for text in (source(example), found["written"]))
        lines = [*difflib.unified_diff(before, after, n=1, lineterm="")][2:]
        command = f"labkit phantom --gpu {example.gpu} --fix {example.file}"
        parts.append(f"## {example.title}\n\n    {command}\n")
        parts.append(f"```text\n{found['answer']}\n```\n")
        parts.append("```diff\n" + "\n".join(lines) + "\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    main()
