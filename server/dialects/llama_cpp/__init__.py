"""llama.cpp's own routes: /completion, /infill, and facts about the server (its tools/server/README.md)."""
