"""`python -m gpuaug.cli`, the form that torchrun starts."""

import sys

from gpuaug.cli import main

sys.exit(main())
