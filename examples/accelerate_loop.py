"""Training with Hugging Face Accelerate: one or many processes, mixed precision, checkpoints that include the loader.

accelerate launch examples/accelerate_loop.py source.root=/data/train augment=standard batch_size=256
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator

import gpuaug

CHECKPOINT = Path("accelerate_loop")


def train(overrides: list[str], *, epochs: int = 3, checkpoint: Path = CHECKPOINT, **settings: object) -> None:
    """Train a small network, from ``checkpoint`` if it exists. ``settings`` go to Accelerator."""
    accelerator = Accelerator(**settings)
    # The loader reads rank and world size itself, and puts batches on the device. It does not need `prepare`.
    cfg = gpuaug.compose("train", [*overrides, f"device={accelerator.device}"])
    with gpuaug.build(cfg) as loader:
        net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 7, stride=8),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(16, loader.num_classes or 1),
        )
        net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
        accelerator.register_for_checkpointing(loader)
        if checkpoint.exists():
            accelerator.load_state(str(checkpoint))
        for epoch in range(loader.epoch, epochs):
            for batch in loader:
                with accelerator.autocast():
                    losses = torch.nn.functional.cross_entropy(net(batch.images), batch.labels, reduction="none")
                valid = batch.valid.to(losses.device)  # False: a repeat to fill the last batch, or not decodable
                loss = (losses * valid).sum() / valid.sum().clamp(min=1)
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
            accelerator.save_state(str(checkpoint))
            accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    train(sys.argv[1:])
