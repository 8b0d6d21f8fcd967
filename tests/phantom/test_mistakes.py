"""Each mistake is named with its line, and a script without it gets no sentence.

A line that is to be named ends with its kind as a comment. The script without mistakes is made by
replacing what they are.
"""

import json
import re
import subprocess
import sys

import pytest
from bs4 import BeautifulSoup

LOOP = """
import torch
import torch.nn.functional as F

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(4096, 256)
        self.query, self.keys = torch.nn.Linear(256, 256), torch.nn.Linear(256, 64)
        self.out, self.spare = torch.nn.Linear(256, 4096), torch.nn.Linear(256, 8192)

    def forward(self, ids):
        rows = self.embedding(ids)
        query = self.query(rows).unflatten(-1, (8, 32)).transpose(1, 2)
        keys = self.keys(rows).unflatten(-1, (2, 32)).transpose(1, 2)
        mask = torch.ones(len(ids), 1, 512, 512, dtype=torch.bool, device="cuda").tril()
        attend = F.scaled_dot_product_attention
        found = attend(query, keys, keys, mask, enable_gqa=True)  # attention-mask
        found = attend(query, found, found, mask.expand(-1, 8, -1, -1))  # attention-mask
        return self.out(found.transpose(1, 2).flatten(2))

net = Net().to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(net.parameters())  # frozen # unused
kept = []

def train():
    net.train()
    ids = torch.ones(4, 512, dtype=torch.int64, device="cuda")
    logits = net(ids)  # kept
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())  # fp32-logits
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return logits, loss

for step in range(6):
    if step == 4:
        net.embedding.requires_grad_(False)
        net.embedding.weight.grad = None
    logits, loss = train()
    kept.append(logits)

net.eval()
ids = torch.ones(4, 512, dtype=torch.int64, device="cuda")
net(ids).argmax(-1)  # gradients
with torch.no_grad():
    results = []
    for _ in range(6):
        logits = net(ids)
        results.append(logits.softmax(-1))  # collected
    del results
    joined = net(ids)
    for _ in range(4):
        logits = net(ids)
        joined = torch.cat([joined, logits])  # collected
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""
LOSSES = """
import torch
from torch.utils.checkpoint import checkpoint

net = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
head = torch.nn.Linear(1024, 1).cuda()
optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()])
losses = []
for _ in range(8):
    rows = torch.ones(256, 1024, device="cuda")
    hidden = checkpoint(net, rows, use_reentrant=True)  # checkpointing
    loss = head(hidden).sum()  # kept
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss)
"""
WHOLE = """
import torch
from torch.utils.checkpoint import checkpoint

layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)]
net = torch.nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(net.parameters())
total = 0
for _ in range(8):
    rows = torch.ones(4096, 64, device="cuda", requires_grad=True)
    loss = checkpoint(net, rows, use_reentrant=False).sum()
    loss.backward()  # checkpointing # kept
    optimizer.step()
    optimizer.zero_grad()
    total = total + loss
"""
EVALUATED = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

LlamaForCausalLM(LlamaConfig(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    vocab_size=1000,
)).save_pretrained("model")
model = LlamaForCausalLM.from_pretrained("model").cuda()
model.gradient_checkpointing_enable()
optimizer = torch.optim.SGD(model.parameters())
ids = torch.ones(2, 128, dtype=torch.int64, device="cuda")
for _ in range(3):
    model(input_ids=ids, labels=ids).loss.backward()  # checkpointing
    optimizer.step()
    optimizer.zero_grad()

def generate(ids: torch.Tensor):
    for _ in range(2):
        logits = model(input_ids=ids, use_cache=False).logits  # gradients
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)

generate(ids)
del model, optimizer
rows = 30 << 30
for _ in range(3):
    try:
        held = torch.empty(rows, dtype=torch.uint8, device="cuda")  # repeated-error
    except torch.OutOfMemoryError:
        continue
"""
GRAPHS = """
import torch
net = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(2)]).cuda()
optimizer = torch.optim.SGD(net.parameters())
rows = torch.ones(1024, 1024, device="cuda")
net(rows).sum().backward()
optimizer.step()
losses = []
for _ in range(5):
    losses.append(net(rows).mean())  # kept
"""
RANKS = """
import os, torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("nccl")
torch.cuda.set_device(rank)
batch = torch.ones(64, 1024, device="cuda:0")  # first-gpu
layers = [torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU()) for _ in range(4)]
net = torch.nn.Sequential(*layers).cuda()
fully_shard(net)
optimizer = torch.optim.SGD(net.parameters())
for _ in range(3):
    net(batch.cuda(rank)).sum().backward()  # one-unit
    optimizer.step()
    optimizer.zero_grad()
whole = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
torch.save(whole, f"{rank}.pt")  # full-state-dict
dist.destroy_process_group()
"""

LAUNCH = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
#: By name: a script, what stands there without mistakes, and how it is launched.
SCRIPTS = {
    "loop": (
        LOOP,
        {
            "attend(query, keys, keys, mask, enable_gqa=True)": (
                "attend(query, *[keys.repeat_interleave(4, 1)] * 2, mask)"
            ),
            ", self.spare = torch.nn.Linear(256, 4096), torch.nn.Linear(256, 8192)": (
                " = torch.nn.Linear(256, 4096)"
            ),
            "AdamW(net.parameters())": "AdamW(list(net.parameters())[1:])",
            "logits.float()": "logits",
            "net.embedding.weight.grad = None": "pass",
            "kept.append(logits)": "kept.append(loss.detach())",
            "net(ids).argmax(-1)": "torch.no_grad()(net)(ids).argmax(-1)",
            "mask.expand(-1, 8, -1, -1)": "mask",
            "logits.softmax(-1)": "logits.softmax(-1).cpu()",
            "joined = net(ids)": "joined = net(ids).cpu()",
            "[joined, logits]": "[joined, logits.cpu()]",
        },
        {},
    ),
    "losses": (
        LOSSES,
        {"use_reentrant=True": "use_reentrant=False", "append(loss)": "append(loss.detach())"},
        {},
    ),
    "whole model": (
        WHOLE,
        {
            "loss = checkpoint(net, rows, use_reentrant=False).sum()": (
                "for layer in net: rows = checkpoint(layer, rows, use_reentrant=False)\n"
                "    loss = rows.sum()"
            ),
            "total + loss": "total + loss.detach()",
        },
        {},
    ),
    "evaluated": (
        EVALUATED,
        {
            ".cuda()": ".cuda().train()",
            "generate(ids)\n": "torch.no_grad()(generate)(ids)\n",
            "        continue": "        rows //= 2",
        },
        {},
    ),
    "graphs": (GRAPHS, {"net(rows).mean()": "torch.no_grad()(net)(rows).mean()"}, {}),
    "ranks": (
        RANKS,
        {
            '"cuda:0"': "rank",
            "fully_shard(net)": "[*map(fully_shard, [*net, net])]",
            "full_state_dict=True": "full_state_dict=True, cpu_offload=True",
        },
        {"launch": LAUNCH, "gpus": 2},
    ),
}


def named(verdict):
    """Return the kind and the line of each mistake."""
    assert not [fault for answer in verdict.answers for fault in answer.faults]
    lines = ((each.kind, verdict.line(each.place)) for each in verdict.mistakes())
    return {(kind, int(line.removeprefix("train.py:"))) for kind, line in lines}


def marked(text):
    """Return the kind and the line of each comment."""
    lines = enumerate(text.splitlines(), 1)
    return {(kind, number) for number, line in lines for kind in re.findall(r"# (\S+)", line)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_mistake_is_named_with_its_line(run, on_phantom, tmp_path, name):
    text, _, options = SCRIPTS[name]
    verdict, printed = run(text, **options)
    assert named(verdict) == marked(text)
    assert verdict.sections()[0].title == "Mistakes"
    if name == "loop":  # and what is noted takes no memory
        assert printed == on_phantom("rtx-4090", tmp_path / "train.py")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_without_mistakes_has_none(run, name):
    text, replaced, options = SCRIPTS[name]
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    verdict, _ = run(text, **options)
    assert verdict.answers[0].ended == "finished", verdict.answers[0].error
    assert named(verdict) == set()
    assert "Mistakes" not in str(verdict)


def test_text_data_and_page_begin_with_the_mistakes(tmp_path):
    (tmp_path / "train.py").write_text(LOSSES)
    command = [sys.executable, "-m", "labkit", "phantom", "--gpu", "t4", "--html", "page.html"]
    done = subprocess.run(
        [*command, "--json", "train.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [each["kind"] for each in answer["mistakes"]] == ["kept", "checkpointing"]
    soup = BeautifulSoup((tmp_path / "page.html").read_text(), "html.parser")
    assert soup.find("h2", id="part1").get_text() == "Mistakes"
    assert answer["mistakes"][0]["says"] in soup.get_text()
    assert soup.find("pre").get_text().strip().startswith("loss = head(hidden).sum()")
