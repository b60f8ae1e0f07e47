"""Device arithmetic, one op per file: docstring with the formula, kernel, launcher, `<op>_reference` in plain torch.

Thread: device (and the caller of a test). In: tensors of one step and packed weights. Out: new tensors, or the caches
written in place. On a CPU the launchers run the C kernels of `_fast.cpu`: float32 arithmetic for float32 and bfloat16
tensors, every sum in an order that depends on neither batch, chunk nor thread count, so a token gets the same bits in
any company. On an accelerator they run the Triton kernel of the same file, or the reference where there is none yet.
"""
