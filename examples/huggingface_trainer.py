"""ConVIRT with the Trainer of Hugging Face transformers.

    python examples/huggingface_trainer.py --data shards/train --out exported/convirt

The Trainer makes its batches from a torch `Dataset`; negatives are those of the batch of one
device.
"""

import argparse
import dataclasses
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import medvl
from medvl.data import ShardSource, Tokenizer, join_texts, train_wordpiece
from medvl.schema import Batch


class Pairs(Dataset[dict[str, Any]]):
    """Images and texts of shards."""

    def __init__(self, source: ShardSource, transform: Any) -> None:
        self.source = source
        self.transform = transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        text = join_texts(self.source.sample(index).sections.values())
        return {"image_CHW": self.transform(self.source.pixels(index))[0], "text": text}


class WithLoss(nn.Module):
    """A system with the inputs and the output that the Trainer expects."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image_BCHW: Tensor, ids_BT: Tensor, mask_BT: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        rows = [str(row) for row in range(len(ids_BT))]
        no_labels_BL = torch.empty(len(rows), 0, device=ids_BT.device)
        batch = Batch(
            keys=rows,
            image_BCHW=image_BCHW,
            ids_BT=ids_BT,
            mask_BT=mask_BT,
            labels_BL=no_labels_BL,
            texts=rows,
        )
        return {"loss": self.model(batch).total}


class Collate:
    """Batches of tensors from pairs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __call__(self, pairs: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        ids_BT, mask_BT = self.tokenizer([pair["text"] for pair in pairs])
        return {
            "image_BCHW": torch.stack([pair["image_CHW"] for pair in pairs]),
            "ids_BT": ids_BT,
            "mask_BT": mask_BT,
        }


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="folder of shards")
    parser.add_argument("--out", required=True, help="new folder for the model")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    from transformers import Trainer, TrainingArguments

    train = ShardSource(options.data)
    texts = [text for index in range(len(train)) for text in train.sample(index).sections.values()]
    tokenizer = train_wordpiece(texts, vocab_size=1000, min_frequency=1)
    model = medvl.create_model(
        "convirt", image_encoder="resnet_tiny", text_encoder="tiny_bert", frozen_text_layers=0,
        image_size=64, projection_dim=64, tokenizer=tokenizer,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, num_train_epochs=options.epochs, per_device_train_batch_size=min(8,
            len(train)),
            # a last batch of one pair would have no negatives, and a loss of 0
            dataloader_drop_last=True,
            learning_rate=1e-3, remove_unused_columns=False, save_strategy="no", report_to=[],
            disable_tqdm=True, logging_steps=1, dataloader_pin_memory=torch.cuda.is_available(),
        )  # fmt: skip
        trainer = Trainer(
            WithLoss(model), arguments, Collate(tokenizer), Pairs(train, model.transform)
        )
        print(trainer.train().training_loss)
    run = {"recipe": "huggingface_trainer", "train_manifest": dataclasses.asdict(train.manifest)}
    print(model.eval().save_pretrained(options.out, run=run))


if __name__ == "__main__":
    main()
