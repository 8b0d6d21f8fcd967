"""Llama-3.1-8B with LoRA, by transformers' Trainer."""

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B", dtype=torch.bfloat16)
model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
tokens = [[1] * 2048] * 64  # yours
arguments = TrainingArguments(
    output_dir="trained",
    per_device_train_batch_size=4,
    max_steps=4,
    bf16=True,
    save_strategy="no",
    report_to="none",
)
rows = Dataset.from_dict({"input_ids": tokens, "labels": tokens})
Trainer(model, arguments, train_dataset=rows).train()
