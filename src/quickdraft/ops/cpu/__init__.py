"""The CPU backend: C++17 kernels behind the Ops protocol."""
