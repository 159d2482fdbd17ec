"""ConVIRT in a plain PyTorch loop, with retrieval of the validation pairs after each epoch.

    python examples/plain_loop.py --data shards/train --valid shards/validate --out exported/convirt

`medvl train convirt` has what is left out here: resume, mixed precision, several ranks, schedules,
fault tolerance.
"""

import argparse
import dataclasses

import torch

import medvl
from medvl.data import ConVIRTAugmentation, ShardSource, WholeText, open_loader, train_wordpiece
from medvl.eval import RetrievalMetrics, open_for_evaluation
from medvl.models import DualEncoder


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
    assert isinstance(model, DualEncoder)  # it has encode_image and encode_text
    loader = open_loader(
        train, batch=8, image=ConVIRTAugmentation.weak(64), text=WholeText(), tokenizer=tokenizer,
        train=True, inputs=model.inputs,
    )  # fmt: skip
    valid_loader = open_for_evaluation(valid, model.transform, tokenizer, batch=32, workers=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    metrics = RetrievalMetrics(ks=(1, 5))

    for epoch in range(options.epochs):
        model.train()
        for batch in loader:
            losses = model(batch)  # Losses(total, terms)
            optimizer.zero_grad()
            losses.total.backward()
            optimizer.step()
        model.eval()
        metrics.reset()
        with torch.no_grad():
            for batch in valid_loader:
                image_BE = model.encode_image(batch.image_BCHW)
                text_BE = model.encode_text(batch.ids_BT, batch.mask_BT)
                metrics.update(image_BE, text_BE, batch.texts)
        values = {name: value.item() for name, value in metrics.compute().items()}
        print(
            f"epoch {epoch}: loss {losses.total.item():.3f}, recall@5 "
            f"{values['recall@5/image_to_text']:.3f}"
        )

    # With the manifest, evaluations refuse the patients of the training data.
    run = {"recipe": "plain_loop", "train_manifest": dataclasses.asdict(train.manifest)}
    print(model.save_pretrained(options.out, results=values, run=run))


if __name__ == "__main__":
    main()
