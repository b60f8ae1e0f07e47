"""The vision tower of Qwen2.5-VL and Qwen2.5-Omni: its numbers (config), tables of a grid, graphs, and the tower."""
