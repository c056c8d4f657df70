"""One rank of distributed runs: iterate, note what was seen, save the state after every batch. Started by torchrun."""

import argparse
import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import kornia.augmentation as K
import torch
import torch.distributed as dist

import gpuaug


def main():
    """Several runs one after the other, with ``--then`` between their arguments."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    words = sys.argv[1:]
    while "--then" in words:
        run(words[: words.index("--then")])
        words = words[words.index("--then") + 1 :]
    run(words)
    dist.destroy_process_group()


def run(words):
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("out", type=Path)
    parser.add_argument("--state", type=Path)
    parser.add_argument("--kill-after", type=int, help="SIGKILL this rank after so many batches")
    parser.add_argument("--last")
    parser.add_argument("--faults", default="raise")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seed-of-rank-1", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="kornia", help="fused is the same bit for bit in any batch, on CUDA too")
    parser.add_argument("--collective", action="store_true", help="a barrier after every batch, as DDP has one")
    args = parser.parse_args(words)
    rank = dist.get_rank() if dist.is_initialized() else 0
    ops = {"flip": K.RandomHorizontalFlip(p=0.5), "jitter": K.ColorJitter(0.3, 0.3, 0.3, 0.1, p=0.8)}
    loader = gpuaug.Loader(
        gpuaug.FolderSource(args.root),
        augment=gpuaug.Augment(crop=gpuaug.RandomResizedCrop(32), ops=ops, backend=args.backend),
        batch_size=args.batch_size,
        last=args.last,
        faults=gpuaug.Faults(policy=args.faults),
        seed=args.seed_of_rank_1 if rank == 1 else 5,
        device=args.device,
        num_workers=1,
    )
    if args.state is not None:
        loader.load_state_dict(json.loads(args.state.read_text()))
    with loader, open(args.out / f"rank{rank}.jsonl", "w") as out:
        try:
            for step, batch in enumerate(loader, start=1):
                for row, index in enumerate(batch.indices.tolist()):
                    data = batch.images[row].cpu().contiguous().view(torch.uint8).numpy().tobytes()
                    digest = hashlib.blake2b(data, digest_size=8).hexdigest()
                    print(json.dumps([step, index, digest, bool(batch.valid[row])]), file=out, flush=True)
                if args.collective:
                    dist.all_reduce(torch.ones(1))
                (args.out / f"state{rank}_{step}.json").write_text(json.dumps(loader.state_dict()))
                if args.kill_after == step:
                    os.kill(os.getpid(), signal.SIGKILL)
        except gpuaug.ConfigError as error:
            (args.out / f"error{rank}.txt").write_text(str(error))


if __name__ == "__main__":
    main()
