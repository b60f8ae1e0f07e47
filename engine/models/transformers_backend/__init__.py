"""Models without a file here, run through transformers' own modules inside our steps.

    skeleton.py    config.json -> the module on the meta device, and what its attention calls say of its caches
    attention.py   what transformers calls as its attention function: our paged cache and kernels
    experts.py     what transformers calls as its experts function: our grouped product on accelerators
    weights.py     the names that checkpoints have -> the module's parameters
    model.py       the Model of text decoders
    showing.py     what a class does with a picture: the classes that do more than our steps are refused
    seeing.py      the Model of classes that see: its tower, and rows of pictures among the embeddings

transformers is imported here and nowhere else in the engine, when a checkpoint needs it.
"""
