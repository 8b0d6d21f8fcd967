"""Experiments that ranks of their own import in tests."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from gpumem.estimation.recipe import Recipe
from gpumem.estimation.training import training
from gpumem.hardware.this_machine import pretended
from gpumem.models import catalogue


def shared(device, rows=4):
    """One weight, whose gradient is averaged over the ranks."""
    weight = nn.Parameter(torch.ones(8, device=device))
    data = torch.full((rows, 8), float(dist.get_rank() + 1), device=device)
    while True:
        loss = (data @ weight).mean()
        loss.backward()
        dist.all_reduce(weight.grad)
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        with torch.no_grad():
            weight -= 0.01 * weight.grad
        weight.grad = None
        yield mean


def listeners(device):
    """How many sockets of this rank and of torchrun wait for other machines."""
    dist.barrier()
    count = 0
    for process in (psutil.Process(), psutil.Process().parent()):
        for connection in process.net_connections("inet"):
            open_to_all = connection.laddr.ip not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")
            count += connection.status == psutil.CONN_LISTEN and open_to_all
    dist.barrier()
    yield torch.tensor(float(count))


def failing(device, how="error", who=1):
    yield torch.zeros(())
    if dist.get_rank() == who:
        if how == "error":
            raise ValueError("this rank has had enough")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        torch.empty(1 << 20, device=device)  # more than its budget
    if how == "endless":
        time.sleep(600)
    dist.barrier()
    yield torch.zeros(())


def hungry(device, late_seconds=0.0):
    """More than its budget; all but the first rank a while later."""
    time.sleep(late_seconds if dist.get_rank() else 0)
    yield torch.zeros(1 << 20, device=device).sum()


def capacity(device):
    """The bytes of the pretended GPU, and whether it came with all that it is."""
    card = pretended()
    yield torch.tensor(float(card.usable_bytes) if card.compute_capability == (9, 0) else 0.0)


def silent(device):
    """A process that ends without a word, as if all were well."""
    yield torch.zeros(())
    os._exit(0)


def endless(device, folder):
    """Starts a process, leaves both ids in the folder, and waits."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    for number in (child.pid, os.getpid()):
        with open(os.path.join(folder, str(number)), "w"):
            pass
    time.sleep(600)
    yield torch.zeros(())


def sharded(device, batch_size=8, width=64, layers=3, offload=False, mixed=False, shard=True):
    """A deep network under ``fully_shard``, each rank with its part of the same batch."""
    torch.manual_seed(0)
    block = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(layers)
    ]
    model = nn.Sequential(*block, nn.Linear(width, 10)).to(device)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if shard:
        mesh = init_device_mesh(device.type, (ranks,))
        options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
        if mixed:
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in model:
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    while True:
        x, y = (torch.randn(batch_size, n, generator=generator) for n in (width, 10))
        mine = slice(rank * batch_size // ranks, (rank + 1) * batch_size // ranks)
        loss = (model(x[mine].to(device)).float() - y[mine].to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / ranks)
        yield mean


def recipe(device, record, layers=3, tied=True):
    """A recipe, as JSON, on a thin Llama; each rank has weights and rows of its own."""
    torch.manual_seed(dist.get_rank())
    config = catalogue.config(
        "SmolLM2-tiny", layers=layers, vocab_size=256, tie_word_embeddings=tied
    )
    yield from training(config, Recipe.from_dict(json.loads(record)))(device)
