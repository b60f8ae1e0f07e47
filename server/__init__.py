"""HTTP and text: everything that runs on the event loop of the one process."""

__version__ = "0.1.0"
