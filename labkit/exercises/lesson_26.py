"""The capstone on one GPU of 24 GB."""

from labkit.exercises.capstone_job import Job, judge
from labkit.exercises.engine import check_of

JOB = Job(model="Llama-3.1-8B", gpu="rtx-4090", rows=8, length=1024, seconds=3.6, most_loss=8.0)


def script():
    return """
import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

parser = argparse.ArgumentParser()
for option in ("--model", "--data", "--out", "--device"):
    parser.add_argument(option)
options = parser.parse_args()

torch.manual_seed(0)
four_bits = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
)
model = AutoModelForCausalLM.from_pretrained(
    options.model,
    dtype=torch.bfloat16,
    quantization_config=four_bits,
    device_map=options.device,
)
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
model.enable_input_require_grads()
model.gradient_checkpointing_enable()
model.train()
trained = [weight for weight in model.parameters() if weight.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=2e-3)
for rows in torch.load(options.data):
    for piece in rows.to(options.device).split(2):  # fewer pieces unpack the weights less often
        loss = model(input_ids=piece, labels=piece).loss
        (loss * len(piece) / len(rows)).backward()
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained(options.out)
"""


@check_of("26-1", script)
def check_script(answer):
    return judge(answer, JOB)
