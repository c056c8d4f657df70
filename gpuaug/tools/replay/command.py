"""`gpuaug replay`: what training saw in a step: its samples, what was drawn for them, and the pictures."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuaug import checks
from gpuaug.display.annotations import Style
from gpuaug.display.batches import contents, name_of
from gpuaug.display.sheet import SheetRow, page, sheet
from gpuaug.errors import ConfigError, StateError
from gpuaug.files import LARGEST_FILE
from gpuaug.loader.batch import Batch
from gpuaug.loader.describe import steps
from gpuaug.loader.loader import Loader
from gpuaug.loader.state import check_state, compare
from gpuaug.source.local import read_file
from gpuaug.tools.preview.command import PAGES
from gpuaug.tools.preview.drawing import cell_of, explanations, rows_of
from gpuaug.tools.preview.originals import Sample, originals
from gpuaug.tools.report import Report, output, save
from gpuaug.tools.request import Keys, Request
from gpuaug.tools.train.checkpoint import about, digests_in, read_checkpoint


@dataclass(frozen=True, kw_only=True)
class Settings(Keys):
    """The keys of `gpuaug replay`."""

    step: Any = None
    spikes: str | None = None
    top: int = 3
    epoch: int | None = None
    sample: Any = None
    state: str | None = None
    digests: str | None = None
    out: str = "replay.html"
    samples: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole_number("top", self.top, 1)
        checks.whole_number("samples", self.samples, 1)
        checks.whole_number("epoch", self.epoch, 0, optional=True)
        if self.digests is not None and self.sample is not None:
            raise ConfigError("`digests` are those of steps, but `sample` names no step. Remove `digests`.")
        if Path(self.out).suffix.lower() not in (".png", *PAGES):
            raise ConfigError(f"`out` must end in .png or {' or '.join(PAGES)}. Found: {self.out!r}.")

    def steps(self) -> list[int]:
        """The numbers of the steps to show; none with ``sample``."""
        given = [name for name in ("step", "spikes", "sample") if getattr(self, name) is not None]
        if len(given) != 1 or (self.epoch is None) != (self.sample is None):
            raise ConfigError(
                "`gpuaug replay` needs step=NUMBER, or spikes=FILE, or epoch=NUMBER and sample=PATH. Found: "
                f"{', '.join(given + ['epoch'] * (self.epoch is not None)) or 'none of them'}."
            )
        if self.spikes is None:
            values = self.step if isinstance(self.step, list) else [] if self.step is None else [self.step]
            if self.step == []:
                raise ConfigError("`step` must be a number or a list of numbers. Found: [].")
        else:
            found = _json(self.spikes, "spikes")
            listed = found.get("steps") if isinstance(found, dict) else None
            listed = listed if isinstance(listed, list) else []
            values = [x.get("step") if isinstance(x, dict) else x for x in listed][: self.top]
            if not values:
                raise ConfigError(f"`spikes` must be a spikes.json of `gpuaug train`. Found: {self.spikes!r}.")
        return [checks.whole_number("step", x, 0) for x in values]


def main(request: Request) -> int:
    settings = Settings(**request.settings())
    numbers, out = settings.steps(), output(settings.out, "out")
    report = Report(file=settings.json)
    state, recipe = _state(request, settings)
    config = request.loader(before=recipe)
    with request.build(config, num_workers=0, prefetch=0) as loader:
        if state is not None:
            if different := compare(state["fingerprint"], loader.fingerprint(), "in the state", "here"):
                raise ConfigError(f"the settings must be those of the training. Found: {different}. Set them as there.")
            loader.load_state_dict(state)
        rows, is_page = list[SheetRow](), out.suffix.lower() in PAGES
        report.values["replayed"] = []
        for title, batches in _groups(loader, numbers, settings):
            rows += _rows(loader, title, batches, settings.samples, is_page=is_page)
            _add(report, loader, title, batches, settings.samples)
        if settings.digests is not None:
            made = [{int(rank): x for rank, x in each["digests"].items()} for each in report.values["replayed"]]
            _compare(report, Path(settings.digests), dict(zip(numbers, made, strict=True)))
        heading: dict[str, Any] = {
            "heading": "replay",
            "lines": [*steps(loader.augment, loader.epoch), f"seed {loader.seed}"],
        }
        if is_page:
            save(out, "out", page(rows, **heading))
        else:
            stream = io.BytesIO()
            sheet(rows, **heading).save(stream, "PNG", optimize=True)
            save(out, "out", stream.getvalue())
    report.add("pictures", str(out), str(out))
    report.write()
    return 0


def _groups(loader: Loader, numbers: list[int], settings: Settings) -> Iterator[tuple[str, dict[int, Batch]]]:
    """A title, and the batches of each step by rank, or of the samples, one step at a time."""
    for step in numbers:
        yield f"step {step}", loader.by_rank(step)
    if settings.epoch is not None:
        yield f"epoch {settings.epoch}", {0: loader.fetch(_indices(loader, settings.sample), epoch=settings.epoch)}


def _json(file: str, key: str) -> Any:
    try:
        return json.loads(read_file(file, limit=LARGEST_FILE))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"`{key}` must be a JSON file. Found: {file!r} ({error}).") from error


def _state(request: Request, settings: Settings) -> tuple[dict[str, Any] | None, list[str]]:
    """The state, and the overrides that select its recipe."""
    if settings.state is None:
        return None, []
    if settings.state.lower().endswith(".json"):
        state = _json(settings.state, "state")
        check_state(state)
        return dict(state), []
    checkpoint = read_checkpoint(Path(settings.state), key="state")
    stored = "train" in about(checkpoint)["recipes"] and request.config_name is None
    own = [f"augment=file:{settings.state}"] if stored and not request.names_recipe else []
    return checkpoint["loader"], own


def _indices(loader: Loader, given: Any) -> list[int]:
    """The numbers of samples, which are given as numbers or keys."""
    values = given if isinstance(given, list) else [given]
    found = []
    for value in values:
        if isinstance(value, str):
            count = loader.source.sample_count or len(loader.source)
            matches = [n for n in range(count) if loader.source.key(n) == value]
            if not matches:
                raise ConfigError(
                    f"`sample` must be the number or the key of a sample, such as {loader.source.key(0)!r}. "
                    f"Found: {value!r}."
                )
            found += matches[:1]
        else:
            found.append(checks.whole_number("sample", value, 0))
    return found


def _each(batches: dict[int, Batch]) -> Iterator[tuple[int, int, int, Batch]]:
    """(rank, row, number of the sample, batch) of every sample."""
    for rank, batch in batches.items():
        for row, index in enumerate(batch.indices.tolist()):
            yield rank, row, index, batch


def _rows(loader: Loader, title: str, batches: dict[int, Batch], most: int, *, is_page: bool) -> list[SheetRow]:
    """The rows of the first ``most`` samples: the original with its crops, and what training saw."""
    samples: list[Sample] = []
    drawn = {rank: contents(batch, batch.look, count=most) for rank, batch in batches.items()}
    for rank, row, index, batch in list(_each(batches))[:most]:
        (sample,) = originals(loader, [index], epoch=loader.epoch)
        explained = explanations(batch, row)
        for each in [] if sample.absent else explained:
            top, left, height, width = each.window
            sample.crops.append((left, top, left + width, top + height))
        sample.augmented, sample.details = drawn[rank][row], ["\n".join(x.lines) for x in explained]
        place = f"{title}{f', rank {rank}' if len(batches) > 1 else ''}, row {row}"
        sample.notes = [place + ("" if bool(batch.valid[row]) else ", not valid")]
        if not is_page:  # a page shows them on hover and on click
            views = [name_of(view) for view in loader.augment.at(loader.epoch).views]
            for view, text in zip(views, sample.details, strict=True):
                sample.notes += [f"{view}:"] * bool(view) + text.splitlines()
        samples.append(sample)
    style = Style.of(loader.source, loader.targets)
    captions = [(name_of(view) or "augmented",) for view in loader.augment.at(loader.epoch).views]
    return rows_of(samples, captions, style, cell=cell_of(loader)) if samples else []


def _add(report: Report, loader: Loader, title: str, batches: dict[int, Batch], most: int) -> None:
    """Keep what was drawn for each sample, and print that of the first ``most``."""
    kept: list[dict[str, Any]] = []
    print(
        f"{title}: {sum(map(len, batches.values()))} samples{f' on {len(batches)} ranks' if len(batches) > 1 else ''}"
    )
    for rank, row, index, batch in _each(batches):
        key, explained = loader.source.key(index), explanations(batch, row)
        if len(kept) < most:
            print(f"  {index}: {key}", *(f"    {'; '.join(x.lines)}" for x in explained), sep="\n")
        views: list[dict[str, Any]] = []
        for x in explained:
            ops = [{"name": s.name, "applied": s.applied, "values": s.values} for s in x.steps]
            views.append({"view": x.view, "copy": x.copy, "window": x.window, "ops": ops})
        place = {"rank": rank, "row": row, "sample": index, "key": key, "valid": bool(batch.valid[row])}
        kept.append({**place, "views": views})
    digests = {str(rank): batch.digest() for rank, batch in batches.items()}
    report.values["replayed"].append({"title": title, "digests": digests, "samples": kept})


def _compare(report: Report, folder: Path, made: dict[int, dict[int, str]]) -> None:
    """Compare the hashes of the batches of each step, by rank, with those that training wrote."""
    equal = total = 0
    for rank in sorted({rank for each in made.values() for rank in each}):
        file = folder / f"digests.rank{rank}.jsonl"
        try:
            known = digests_in(read_file(str(file), limit=LARGEST_FILE).decode(errors="replace"))
        except OSError as error:
            expected = "`digests` must be the folder `out` of `gpuaug train digests=true`"
            raise ConfigError(f"{expected}. Found: {str(file)!r} ({error!r}).") from error
        for step, each in made.items():
            if rank in each and step in known:
                total += 1
                equal += each[rank] == known[step]
    if not total:
        raise ConfigError(f"`digests` must hold the steps. Found: none of {sorted(made)} in {str(folder)!r}.")
    said = f"{equal} of {total} batches equal those of the training, bit for bit"
    missing = sum(map(len, made.values())) - total
    report.add("equal_batches", equal, f"{said}; {missing} more have no digest there" if missing else said)
    if equal < total:
        raise StateError(
            f"{total - equal} of {total} batches differ from those of the training. Use the same files, device and "
            "`decode` settings, and give the run's last state, such as state=OUT/last.pt."
        )
