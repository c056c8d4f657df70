"""`python -m gpuaug.tools`, the form that torchrun starts."""

import sys

from gpuaug.tools.main import main

sys.exit(main())
