"""The HTTP edge: connections, exchanges, bodies, who may ask, event streams. All of it lives on the loop."""
