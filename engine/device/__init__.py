"""The devices that steps run on: an accelerator with its streams and graphs, or the host; their memory and profiles."""
