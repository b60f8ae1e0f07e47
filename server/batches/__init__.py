"""Files that clients upload, and batches of requests that are answered when no other request needs the engine."""
