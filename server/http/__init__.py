"""The HTTP edge: connections, exchanges, bodies, authentication, event streams. All of it runs on the loop."""
