"""What runs steps: a folder per kind of device, with files of the same names, behind the protocols of base.py."""
