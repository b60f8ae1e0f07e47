"""Start and end of the process: the model's files, loading, the socket, signals, and the order of these steps."""
