"""Set before anything imports triton: the CUDA backend's kernels run in the interpreter here."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
