"""The command line: `gpuaug COMMAND [OVERRIDE ...]`. Heavy modules are imported only when a command runs."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import logging
import os
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from typing import NoReturn

from gpuaug.config import conf_folder
from gpuaug.errors import ConfigError, GpuaugError

log = logging.getLogger("gpuaug")

COMMANDS = {
    "train": "train a network, such as one of timm or torchvision, with AMP, DDP, checkpoints and resume",
    "pack": "write a resized copy of a source: JPEG shards, or pixels that need no decoding",
    "profile": "measure every stage, name the bottleneck, and say what to change",
    "plan": "measure in a short trial run how much host and device memory a run needs",
    "preview": "show a recipe's images exactly as training sees them: PNG, HTML or a live page",
    "replay": "show what training saw in a step: samples, random parameters, pictures",
    "export": "write a recipe for evaluation, and a model behind it, as one ONNX or torch file",
    "doctor": "check this machine (versions, devices, decoders, compiler, workers, limits) and give advice",
    "parity": "compare our pixels and policies with those of Pillow, torchvision and timm, on your own images",
}
EPILOG = """\
Overrides use Hydra's syntax, as in gpuaug.compose:
  source.root=DIR augment=simclr augment.ops.jitter.p=0.5 '~augment.ops.gray' batch_size=256 device=cuda

`gpuaug COMMAND --help` lists the command's own keys. The loader's keys are in
  {train} and the folders beside that file.
Under torchrun: torchrun --nproc-per-node 2 -m gpuaug.tools train source.root=DIR
"""


# options of Hydra applications, and what to use instead
_PRINT = "python -c \"import gpuaug, omegaconf; print(omegaconf.OmegaConf.to_yaml(gpuaug.compose('train', [])))\""
HYDRAS = {
    **dict.fromkeys(("-m", "--multirun"), "One call is one run. Call gpuaug in a loop, or write a Hydra application"),
    **dict.fromkeys(("-c", "--cfg", "--resolve", "-p", "--package"), f"To print a configuration: {_PRINT}"),
    **dict.fromkeys(("-i", "--info", "--hydra-help"), "`gpuaug COMMAND --help` lists the keys"),
    **dict.fromkeys(("-cd", "-cp", "--config-path"), "Use --config-dir for the folder of your own configuration"),
    "-cn": "Use --config-name for the name of your own configuration",
    **dict.fromkeys(("-r", "--run"), "Leave this option out"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """For an option of Hydra applications, say what to use instead."""
        for word in (word.partition("=")[0] for word in message.partition("arguments: ")[2].split()):
            if word in HYDRAS:
                self.exit(2, f"gpuaug: `{word}` belongs to Hydra applications. {HYDRAS[word]}.\n")
            if word.startswith("--"):
                if close := difflib.get_close_matches(word, self._option_string_actions, n=1):
                    self.exit(2, f"gpuaug: there is no option `{word}`. Did you mean `{close[0]}`?\n")
                key = word[2:].replace("-", "_")
                self.exit(2, f"gpuaug: there is no option `{word}`. Keys are written without dashes: {key}=VALUE.\n")
        super().error(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0: success. 1: `gpuaug doctor` found something broken. 2: an error that the user can fix. 130: Ctrl-C. 141: the
    reader of stdout has closed the pipe. 143: SIGTERM stopped the training.
    """
    parser = _parser()
    given = parser.parse_intermixed_args(argv)
    with _logging():
        try:
            status = _run(given, parser)
            sys.stdout.flush()
            return status
        except BrokenPipeError:
            # stdout's: that of a worker is a ReadError
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # drops buffered output
            return 141
        except (GpuaugError, KeyboardInterrupt) as error:
            if given.debug or os.environ.get("GPUAUG_DEBUG"):
                traceback.print_exc()
            if isinstance(error, KeyboardInterrupt):
                print("gpuaug: interrupted", file=sys.stderr)
                return 130
            rank = os.environ.get("RANK", "0")
            print(f"gpuaug{'' if rank == '0' else f' (rank {rank})'}: {error}", file=sys.stderr)
            return 2


def _run(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if not given.words:
        print(parser.format_help())
        return 0 if given.help else 2
    name, *overrides = given.words
    if name not in COMMANDS:
        raise ConfigError(f"`{name}` is not a command. {_nearest(name)}")
    if given.help:
        print(_help(name, parser))
        return 0
    # Must be set before torch is imported. PASSIVE: waiting OpenMP threads sleep, so the loader gets their CPU time.
    # `gpuaug train` on two busy cores: 46 images/s if threads spin, 348 images/s if threads sleep.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from gpuaug.tools.request import Request

    options = {key: getattr(given, key) for key in ("config_dir", "config_name", "at")}
    request = Request(command=name, overrides=tuple(overrides), trust=tuple(given.trust), **options)
    return int(importlib.import_module(f"gpuaug.tools.{name}.command").main(request))


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:10} {text}" for name, text in COMMANDS.items())
    parser = _Parser(
        prog="gpuaug",
        usage="gpuaug COMMAND [OVERRIDE ...] [options]",
        description=f"Turns encoded images into augmented batches on the training device.\n\ncommands:\n{listed}",
        epilog=EPILOG.format(train=conf_folder() / "gpuaug" / "train.yaml"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("-h", "--help", action="store_true", help="show this text; after COMMAND, show its keys")
    parser.add_argument("--config-dir", metavar="DIR", help="folder of your own configurations")
    parser.add_argument("--config-name", metavar="NAME", help="your own configuration file in DIR")
    parser.add_argument("--at", metavar="PATH", help="path of the loader in your configuration, e.g. train_data")
    parser.add_argument(
        "--trust",
        metavar="PREFIX",
        action="append",
        default=[],
        help="allow `_target_` in modules whose name begins with PREFIX; the current folder is searched too",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks (like GPUAUG_DEBUG=1)")
    return parser


def _help(name: str, parser: argparse.ArgumentParser) -> str:
    keys = (conf_folder() / "gpuaug" / "command" / f"{name}.yaml").read_text(encoding="utf-8")
    parser.usage = f"gpuaug {name} [OVERRIDE ...] [options]"
    parser.description = f"{COMMANDS[name]}\n\nkeys and defaults:\n{textwrap.indent(keys.rstrip(), '  ')}"
    parser.epilog = None
    return parser.format_help()


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    if not near and "=" in name:
        return f"The command comes first: gpuaug {next(iter(COMMANDS))} {name}"
    return f"Did you mean `{near[0]}`?" if near else f"Commands: {', '.join(COMMANDS)}."


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    """Log to stderr. Under torchrun, only the first rank logs more than warnings."""
    handler = logging.StreamHandler()  # prints the message only
    before = log.level, log.propagate
    log.addHandler(handler)
    log.propagate = False
    log.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.level, log.propagate = before
