"""The CUDA backend: Triton kernels over torch tensors. Imported by ops/select.py alone, and only when
asked for.
"""
