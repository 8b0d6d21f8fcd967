"""The language model of Lightning's "Train models with billions of parameters using FSDP"
(https://lightning.ai/docs/pytorch/stable/advanced/model_parallel/fsdp.html), made of the demos that
Lightning's package brings."""

import pytorch_lightning as lightning
import torch
from pytorch_lightning.demos.transformer import Transformer, WikiText2
from pytorch_lightning.strategies import FSDPStrategy
from torch.utils.data import DataLoader


class LanguageModel(lightning.LightningModule):
    def __init__(self, words):
        super().__init__()
        self.model = Transformer(words, ninp=1024, nhead=64, nhid=4096, nlayers=32)

    def training_step(self, batch):
        words, following = batch
        loss = torch.nn.functional.nll_loss(self.model(words, following), following.view(-1))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


lightning.seed_everything(42)
data = WikiText2()
trainer = lightning.Trainer(accelerator="cuda", devices=2, strategy=FSDPStrategy())
trainer.fit(LanguageModel(data.vocab_size), DataLoader(data))
