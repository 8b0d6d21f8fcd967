"""GPT-2 from the start, in a plain loop."""

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

model = GPT2LMHeadModel(GPT2Config()).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
tokens = torch.randint(0, 50257, (96, 1024))  # yours
model.train()
for batch in DataLoader(tokens, batch_size=16):
    batch = batch.cuda()
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
