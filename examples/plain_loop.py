"""A plain training loop that continues from its last checkpoint with the next sample.

python examples/plain_loop.py source.root=/data/train augment=standard batch_size=256
"""

import sys
from pathlib import Path

import torch

import gpuaug

EPOCHS, EVERY, CHECKPOINT = 3, 100, Path("plain_loop.pt")


def train(overrides: list[str], *, epochs: int = EPOCHS, checkpoint: Path = CHECKPOINT, every: int = EVERY) -> None:
    """Train a small network, from ``checkpoint`` if it exists."""
    with gpuaug.build(gpuaug.compose("train", overrides)) as loader:
        net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 7, stride=8),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(16, loader.num_classes or 1),
        ).to(loader.device)
        optimizer = torch.optim.AdamW(net.parameters())

        def save() -> None:
            states = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
            torch.save(states, checkpoint.with_suffix(".part"))
            checkpoint.with_suffix(".part").replace(checkpoint)  # if killed before this, the old file stays

        if checkpoint.exists():
            states = torch.load(checkpoint, map_location=loader.device, weights_only=True)
            net.load_state_dict(states["net"])
            optimizer.load_state_dict(states["optimizer"])
            loader.load_state_dict(states["loader"])  # workers, batch size and ranks may have changed
        for epoch in range(loader.epoch, epochs):
            for step, batch in enumerate(loader, start=1):
                loss = torch.nn.functional.cross_entropy(net(batch.images), batch.labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if step % every == 0:
                    save()
            save()
            print(f"epoch {epoch}: loss {loss.item():.3f}, waited {loader.waited:.1f} s for data")


if __name__ == "__main__":
    train(sys.argv[1:])
