"""The capstone on eight GPUs of 80 GB."""

from labkit.exercises.capstone_job import Job, judge
from labkit.exercises.engine import check_of

JOB = Job(model="Llama-2-70B", gpu="h100", gpus=8, rows=2, length=4096, seconds=5.5, most_loss=5.0)


def script():
    return """
import argparse
import os
import sys

# Blocks of all sizes share their segments, so that little is reserved beyond the peak.
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

parser = argparse.ArgumentParser()
for option in ("--model", "--data", "--out", "--device"):
    parser.add_argument(option)
options = parser.parse_args()

on_gpu = options.device == "cuda"
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if on_gpu else "gloo")
rank = dist.get_rank()
ranks = dist.get_world_size()
mesh = init_device_mesh(options.device, (ranks,))

torch.manual_seed(0)
config = AutoConfig.from_pretrained(options.model)
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.gradient_checkpointing_enable()
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
model.to_empty(device=options.device)
model.init_weights()
model.train()

# One weight after the other: no square roots of all second moments at the same time.
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for rows in torch.load(options.data):
    mine = rows.chunk(ranks)[rank].to(options.device)
    model(input_ids=mine, labels=mine).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
weights = get_model_state_dict(model, options=whole)
if rank == 0:
    model.save_pretrained(options.out, state_dict=weights)
dist.barrier()  # nobody leaves while another still talks
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # gloo's threads outlive the group, and can abort a Python that ends
"""


@check_of("27-1", script)
def check_script(answer):
    return judge(answer, JOB)
