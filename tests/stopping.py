"""A SIGTERM that comes at a known place of a training."""

from gpuaug.tools.train import training


class StopAfter(training.Stop):
    """SIGTERM at the n-th time that the training looks whether it has come."""

    left = 0

    @property
    def asked(self) -> bool:
        type(self).left -= 1
        return type(self).left <= 0

    @asked.setter
    def asked(self, value: bool) -> None: ...
