"""Decodes damaged files of stored values; `test_values.py` watches, and counts every death."""

import random
import sys

import stored
from fuzz_child import say, serve

from gpuaug.augment.crop import Resize

LIMIT = 32 << 20  # decode.max_bytes


class Job:
    """One variant, backend and size: ``settings`` is "variant;backend;height;width"."""

    def __init__(self, settings: str) -> None:
        self.variant, backend, *size = settings.split(";")
        dtype = "float32" if self.variant == "lerc" else "uint16"
        self.image = stored.picture(dtype, 4, *map(int, size))
        self.file = stored.encoded(self.variant, self.image)
        self.decoder = stored.opened(4, backend=backend, max_bytes=LIMIT)
        image, reason = stored.decoded(self.decoder, self.file)
        assert image is not None, reason
        assert (image == self.image).all()

    def check(self, numbers: list[int], *, alone: bool) -> dict[int, str]:
        """Of each damaged file: "fault", "same" or "values" (another image of the same shape and type)."""
        if alone:  # the good file, so often
            return dict.fromkeys(numbers, self.several(len(numbers)))
        verdicts = {}
        for number in numbers:
            say({"at": number})
            file = stored.damaged(self.file, random.Random(number))
            image, reason = stored.decoded(self.decoder, file)
            if image is None:
                verdicts[number] = "fault" if reason else "a fault without a reason"
            elif image.shape[2] != 4 or image.dtype != self.image.dtype:
                verdicts[number] = f"wrong: {image.dtype} {image.shape}"
            else:
                same = image.shape == self.image.shape and (image == self.image).all()
                verdicts[number] = "same" if same else "values"
        return verdicts

    def several(self, count: int) -> str:
        headers = self.decoder.read_headers(stored.batch(*[self.file] * count))
        window = Resize((32, 32)).windows(None, headers.height, headers.width)
        return "fault" if headers.faults or self.decoder.pixels(headers, [window])[1] else "same"

    def promised(self) -> int:
        return LIMIT


if "--serve" in sys.argv:
    jobs: dict[str, Job] = {}
    serve(lambda settings: jobs.setdefault(settings, Job(settings)) if settings not in jobs else jobs[settings])
