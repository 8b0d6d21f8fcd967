"""ViT-B/16 on pictures."""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

model = ViTForImageClassification(ViTConfig(num_labels=1000)).cuda().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.3)
data = TensorDataset(torch.zeros(512, 3, 224, 224), torch.zeros(512, dtype=torch.int64))  # yours
for pictures, labels in DataLoader(data, batch_size=128):
    logits = model(pixel_values=pictures.cuda()).logits
    cross_entropy(logits, labels.cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()
