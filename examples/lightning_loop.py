"""ConVIRT in a LightningModule, with retrieval of the validation pairs.

python examples/lightning_loop.py --data shards/train --valid shards/validate --out exported/convirt
"""

import argparse
import dataclasses
from typing import Any

import torch

# before lightning: it makes torchvision importable where torch and torchvision are different builds
import medvl

# isort: split
import lightning

from medvl.data import ConVIRTAugmentation, ShardSource, WholeText, open_loader, train_wordpiece
from medvl.eval import RetrievalMetrics, open_for_evaluation
from medvl.schema import Batch


class Pretraining(lightning.LightningModule):
    """Loss of any system, and retrieval by its embeddings."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.retrieval = RetrievalMetrics(ks=(1, 5))

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        """Return the batch on the device."""
        return batch.to(device)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        losses = self.model(batch)
        self.log("loss", losses.total, batch_size=len(batch), prog_bar=True)
        total: torch.Tensor = losses.total
        return total

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add the embeddings of a batch."""
        image_BE = self.model.encode_image(batch.image_BCHW)
        self.retrieval.update(
            image_BE, self.model.encode_text(batch.ids_BT, batch.mask_BT), batch.texts
        )

    def on_validation_epoch_end(self) -> None:
        """Log the metrics over all ranks."""
        self.log_dict({name: value.float() for name, value in self.retrieval.compute().items()})
        self.retrieval.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimiser."""
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


def main() -> None:
    """Train, evaluate, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="folder of shards")
    parser.add_argument("--valid", required=True, help="folder of shards of other patients")
    parser.add_argument("--out", required=True, help="new folder for the model")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    train = ShardSource(options.data)
    valid = ShardSource(options.valid)
    texts = [text for index in range(len(train)) for text in train.sample(index).sections.values()]
    tokenizer = train_wordpiece(texts, vocab_size=1000, min_frequency=1)
    model = medvl.create_model(
        "convirt", image_encoder="resnet_tiny", text_encoder="tiny_bert", frozen_text_layers=0,
        image_size=64, projection_dim=64, tokenizer=tokenizer,
    )  # fmt: skip
    loader = open_loader(  # the loader itself divides batches among ranks
        train, batch=8, image=ConVIRTAugmentation.weak(64), text=WholeText(), tokenizer=tokenizer,
        train=True, inputs=model.inputs,
    )  # fmt: skip
    valid_loader = open_for_evaluation(valid, model.transform, tokenizer, batch=32, workers=0)
    trainer = lightning.Trainer(
        max_epochs=options.epochs, accelerator="auto", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Pretraining(model), loader, valid_loader)
    results = {name: value.item() for name, value in trainer.callback_metrics.items()}
    print(results)
    run = {"recipe": "lightning_loop", "train_manifest": dataclasses.asdict(train.manifest)}
    print(model.save_pretrained(options.out, results=results, run=run))


if __name__ == "__main__":
    main()
