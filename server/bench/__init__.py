"""python -m server bench: what a server gives its clients, what the engine gives alone, and what its parts take."""
