"""HTTP and text: everything that lives on the event loop of the one process."""

__version__ = "0.1.0"
