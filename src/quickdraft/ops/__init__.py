"""The only place that owns kernels and buffers: one interface, one oracle, one folder per backend."""
