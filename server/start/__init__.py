"""Start and end of the process: files of the model, loading, the socket, signals, and the order of all of it."""
