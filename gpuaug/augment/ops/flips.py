"""Flips."""

from __future__ import annotations

from gpuaug.augment.ops.entry import Code, Entry, step

ENTRIES = {
    "RandomHorizontalFlip": Entry("matrix", steps=step(Code.HFLIP)),
    "RandomVerticalFlip": Entry("matrix", steps=step(Code.VFLIP)),
}
