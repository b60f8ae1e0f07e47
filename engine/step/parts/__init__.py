"""Parts: optional capabilities of a step, one file each. part.py has their base class, order.py the hooks' order."""
