"""What remedies say is written where it belongs, and the rest of a script stays as it is."""

import pytest

from gpumem.inputs import InputError
from phantom_gpu.remedies import REMEDIES
from phantom_gpu.report_records import Edit, Effect, Offer, Place
from phantom_gpu.write_edits import missing_imports, variable, written

SCRIPT = """\
"A docstring."
import torch
loader = DataLoader(
    rows,  # "tokens" – of a text
    batch_size=(8),
)
if True:
    model = Net().to(device)  # on the GPU
    optimizer = optim.Adam(
        (p for p in (model.parameters())), betas=(0.9, 0.95), lr=(1e-3), eps=1e-6
    )
trainer = Trainer()"""
WRITTEN = """\
"A docstring."
import bitsandbytes
import torch
loader = DataLoader(
    rows,  # "tokens" – of a text
    batch_size=(4), shuffle=True,
)
if True:
    model = Net().to(device)  # on the GPU
    first(model)
    second(model)
    optimizer = bitsandbytes.optim.AdamW8bit(
        (p for p in (model.parameters())), lr=(1e-3), fused=torch.cuda.is_available()
    )
trainer = Trainer(precision='bf16')
"""


def offer(*edits):
    edits = [Edit(Place(kind, line), line, how, code) for kind, line, how, code in edits]
    return Offer("a", "a", Effect.NOTHING, "nothing", tuple(edits))


def test_lines_are_written_and_the_rest_stays():
    offers = [
        offer(
            ("loader", "x.py:3", "arguments", "batch_size=4, shuffle=True"),
            ("moved", "x.py:8", "after", "first(model)"),
        ),
        offer(
            ("moved", "x.py:8", "after", "second(model)"),
            ("optimizer", "x.py:9", "class", "bitsandbytes.optim.AdamW8bit"),
            ("optimizer", "x.py:9", "without", "betas, eps"),
            ("optimizer", "x.py:10", "arguments", "fused=torch.cuda.is_available()"),
            ("environment", "", "variable", "A=1"),
        ),
        offer(("lightning", "x.py:12", "arguments", "precision='bf16'")),
    ]
    assert written(SCRIPT, offers) == WRITTEN


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (("optimizer", "x.py:8", "arguments", "lr=1"), "x.py:8 has 0 calls"),
        (("optimizer", "x.py:9", "without", "amsgrad"), "no argument amsgrad"),
        (("model", "", "after", "first(model)"), "nobody knows where"),
    ],
)
def test_what_has_no_place_is_refused(edit, says):
    with pytest.raises(InputError, match=says):
        written(SCRIPT, [offer(edit)])


@pytest.mark.parametrize(
    ("line", "kind", "name"),
    [
        ("net = AutoModel.from_pretrained(name).to('cuda').train()", "loaded", "net"),
        ("self.net = models.Net.from_pretrained(name)", "loaded", "self.net"),
        ("net.model.cuda()", "cuda", "net.model"),
        ("net = net.to(device)", "moved", "net"),
        ("opt = AdamW(net.parameters())", "optimizer", "opt"),
        ("net = DDP(Net().cuda())", "cuda", ""),
        ("nets = [Net().cuda()]", "cuda", ""),
        ("first, second = Net().cuda()", "cuda", ""),
        ("def load(): return AutoModel.from_pretrained(name)", "loaded", ""),
        ("Trainer(AutoModel.from_pretrained(name))", "loaded", ""),
        ("!pip install torch", "loaded", ""),
    ],
)
def test_the_variable_that_holds_what_was_made_is_found(line, kind, name):
    assert variable(f"import torch\n{line}\n", 2, kind) == name


def test_what_is_not_imported_is_said():
    [edit] = offer(("optimizer", "x.py:2", "class", "bitsandbytes.optim.AdamW8bit")).edits
    assert missing_imports("import torch\noptimizer = torch.optim.Adam([])", [edit]) == [
        "bitsandbytes"
    ]
    assert missing_imports("import bitsandbytes", [edit]) == []
    [edit] = offer(("loaded", "x.py:2", "after", "    from transformers.utils import a")).edits
    assert missing_imports("", [edit]) == []
    way = next(remedy for remedy in REMEDIES if remedy.name == "lora").ways[0]["trl"]
    [edit] = offer(("trl", "x.py:2", "arguments", way.codes["arguments"]())).edits
    assert missing_imports("from peft import LoraConfig", [edit]) == ["peft"]
