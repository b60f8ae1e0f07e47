"""Models without a native file, run through transformers' own modules inside our steps.

    skeleton.py    config.json -> the module on the meta device, and its caches and experts, found from its calls
    calls.py       the recorded calls of a forward, and the step that a thread's forward belongs to
    attention.py   the attention function that transformers calls: our paged cache and kernels
    experts.py     the experts function that transformers calls: our grouped matrix product on accelerators
    weights.py     names in checkpoints -> the module's parameters
    model.py       the Model of text decoders
    showing.py     tests how a class passes an item to its decoder; classes that our steps cannot serve are refused
    class_tower.py a class's tower: rows of pictures, video and audio, of several requests in a run
    seeing.py      the Model of classes that take media: rows of items replace embeddings

Only this package of the engine imports transformers, when a checkpoint needs it.
"""
