"""Matrix products with weights: `weight` is the interface, `pack` chooses the form of a weight.

Forms of float weights: panels (CPU), dense and invariant (accelerators). Forms of quantised weights: group_panels
(CPU), group_weight and float8_weight (accelerators), and parts. Kernels of the dense form: split_k with its epilogue,
gated_one_wave, gated_persistent. `algorithms` chooses among the algorithms of the vendor's library (cublaslt), `scaled`
between FP8 products of the library and of float8; long_products decides when a quantised weight is widened completely;
`timed` holds these three for an accelerator.
Thread: device.
"""
