"""What a configuration makes: a model's parts, their shapes and caches, and the kernels that steps launch."""
