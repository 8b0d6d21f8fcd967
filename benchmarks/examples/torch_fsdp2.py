"""Llama-3.1-8B, sharded as PyTorch's "Getting Started with Fully Sharded Data Parallel" shows
(https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html): meta device, mixed precision,
clipped gradients, Adam."""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

rank = int(os.environ["LOCAL_RANK"])
device = torch.device(f"cuda:{rank}")
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)

config = AutoConfig.from_pretrained("meta-llama/Llama-3.1-8B")
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
model.to_empty(device=device)
model.init_weights()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for _ in range(10):
    ids = torch.randint(0, config.vocab_size, (1, 2048), device=device)
    model(input_ids=ids, labels=ids).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
