"""ConVIRT with Hugging Face Accelerate: the same loop on a CPU, a GPU, or several.

accelerate launch examples/accelerate_loop.py --data shards/train --out exported/convirt
"""

import argparse
import dataclasses

import torch
from accelerate import Accelerator

import medvl
from medvl.data import ConVIRTAugmentation, ShardSource, WholeText, open_loader, train_wordpiece


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="folder of shards")
    parser.add_argument("--out", required=True, help="new folder for the model")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    accelerator = Accelerator()
    train = ShardSource(options.data)
    texts = [text for index in range(len(train)) for text in train.sample(index).sections.values()]
    tokenizer = train_wordpiece(texts, vocab_size=1000, min_frequency=1)
    torch.manual_seed(0)  # the same initial weights on all ranks
    plain = medvl.create_model(
        "convirt", image_encoder="resnet_tiny", text_encoder="tiny_bert", frozen_text_layers=0,
        image_size=64, projection_dim=64, tokenizer=tokenizer,
    )  # fmt: skip
    loader = open_loader(  # not prepared: it divides each global batch among the ranks itself
        train, batch=8, image=ConVIRTAugmentation.weak(64), text=WholeText(), tokenizer=tokenizer,
        train=True, rank=accelerator.process_index, world=accelerator.num_processes,
        inputs=plain.inputs,
    )  # fmt: skip
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))

    for epoch in range(options.epochs):
        model.train()
        for batch in loader:
            losses = model(batch.to(accelerator.device))  # negatives come from all ranks
            optimizer.zero_grad()
            accelerator.backward(losses.total)
            optimizer.step()
        accelerator.print(f"epoch {epoch}: loss {losses.total.item():.3f}")

    if accelerator.is_main_process:
        run = {"recipe": "accelerate_loop", "train_manifest": dataclasses.asdict(train.manifest)}
        print(accelerator.unwrap_model(model).save_pretrained(options.out, run=run))


if __name__ == "__main__":
    main()
