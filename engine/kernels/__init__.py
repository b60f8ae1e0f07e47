"""Device arithmetic, one op per file: a docstring with the formula, kernel, launcher, `<op>_reference` in plain torch.

Thread: device (and the caller of a test). In: tensors of one step and packed weights. Out: new tensors, or the caches
written in place. On a CPU the launchers run the C kernels of `_fast.cpu`: float32 arithmetic for float32 and bfloat16
tensors. The order of every sum depends on neither batch, chunk nor thread count, so a token gets the same bits whatever
else is in the batch. On an accelerator they run the Triton kernel of the same file, or the reference if there is none.
"""
