"""Qwen2-0.5B with its weights and Adam on the host, as DeepSpeed's "Getting Started" trains
(https://www.deepspeed.ai/getting-started/), with the settings of its ZeRO-3 offload tutorial
(https://www.deepspeed.ai/tutorials/zero/)."""

import argparse

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
arguments = deepspeed.add_config_arguments(parser).parse_args()

config = AutoConfig.from_pretrained("Qwen/Qwen2-0.5B-Instruct")
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.gradient_checkpointing_enable()
engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())
for _ in range(10):
    ids = torch.randint(0, config.vocab_size, (1, 2048), device=engine.device)
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
