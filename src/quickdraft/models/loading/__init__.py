"""Readers of model files: data in, ops.weights values out."""
