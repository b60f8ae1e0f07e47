"""Tool calls in a model's output: three machines that read them, and the table of formats."""
