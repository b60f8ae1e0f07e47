"""Models without a file here, run through transformers' own modules inside our steps.

    skeleton.py    config.json -> the module on the meta device, and what its calls say of its caches and experts
    calls.py       the calls of a forward, and the step that a thread's forward is for
    attention.py   what transformers calls as its attention function: our paged cache and kernels
    experts.py     what transformers calls as its experts function: our grouped product on accelerators
    weights.py     the names that checkpoints have -> the module's parameters
    model.py       the Model of text decoders
    showing.py     what a class does with an item: the classes that do more than our steps are refused
    class_tower.py a class's tower: rows of pictures, films and sounds, of several requests in a run
    seeing.py      the Model of classes that take media: rows of items among the embeddings

transformers is imported here and nowhere else in the engine, when a checkpoint needs it.
"""
