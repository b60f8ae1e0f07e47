"""The vision tower of Qwen2-VL, 2.5-VL, 2.5-Omni and 3-VL: config, weight names, layers, grid tables, graphs, tower."""
